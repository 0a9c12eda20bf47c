"""The routes with which trainers pause, resume and flush all engines, and take their GPU memory for a while.

They have the names of vLLM and SGLang. Each call reaches every replica before it is answered. They are apart from
admin_api.py, because clients of other servers call them with those servers' bodies.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.runtime_changes import check_may_control, check_may_load
from lorafleet.api.answer import server_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.parsing import parse_query, read_body
from lorafleet.api.request.trainer_bodies import (
    AbortRequest,
    ContinueGenerationRequest,
    FlushQuery,
    MemoryOccupationRequest,
    PauseGenerationRequest,
    PauseQuery,
    SleepQuery,
    WakeUpQuery,
)
from lorafleet.api.routes.build_api import Route
from lorafleet.api.routes.operations import PlainText, describe
from lorafleet.cluster.admin.group_api import GroupApi
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.admin.tensor_load_api import TensorLoadApi
from lorafleet.protocol.admin_verbs import ControlEngines
from lorafleet.protocol.engine_control import (
    ALL_MEMORY,
    AbortRequests,
    EngineControl,
    FlushPrefixes,
    MemoryTag,
    PauseEngine,
    PauseMode,
    ResumeEngine,
    SleepEngine,
    WakeEngine,
)
from lorafleet.protocol.errors import InvalidRequest

Body = TypeVar("Body", bound=Strict)

# Retracted requests give up their keys and values in SGLang. Here these belong to one adapter's digest and stay valid.
SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}

logger = logging.getLogger("lorafleet.http")


def trainer_routes(admin: AdapterAdmin) -> list[Route]:
    api = _TrainerApi(admin)
    return [
        ("POST", "/pause", "loading", api.pause),
        ("POST", "/resume", "loading", api.resume),
        ("GET", "/is_paused", "loading", api.is_paused),
        ("POST", "/sleep", "loading", api.sleep),
        ("POST", "/wake_up", "loading", api.wake_up),
        ("GET", "/is_sleeping", "loading", api.is_sleeping),
        ("POST", "/release_memory_occupation", "loading", api.release_memory),
        ("POST", "/resume_memory_occupation", "loading", api.resume_memory),
        ("POST", "/pause_generation", "loading", api.pause_generation),
        ("POST", "/continue_generation", "loading", api.continue_generation),
        ("POST", "/abort_request", "loading", api.abort_request),
        ("POST", "/flush_cache", "loading", api.flush_cache),
        ("GET", "/flush_cache", "loading", api.flush_cache),
        ("POST", "/reset_prefix_cache", "loading", api.reset_prefix_cache),
        ("POST", "/load_lora_adapter_from_tensors", "loading", TensorLoadApi(admin).load_from_tensors),
        # AReaL's names, which it adds to vLLM.
        ("POST", "/areal_pause_generation", "loading", api.pause_generation),
        ("POST", "/areal_continue_generation", "loading", api.continue_generation),
        *GroupApi(admin).routes(),
    ]


class _TrainerApi:
    def __init__(self, admin: AdapterAdmin) -> None:
        self._admin = admin

    @describe("Pause all replicas, as in vLLM", query=PauseQuery, answer=server_types.Status)
    async def pause(self, state: AppState, request: Request) -> Response:
        query = parse_query(request, PauseQuery)
        check_may_control(state, caller_of(request))
        mode: PauseMode = query.mode or ("wait" if query.wait_for_inflight_requests else "abort")
        await begin(request, mode=mode)
        await self._order(PauseEngine(mode))
        if query.clear_cache and mode != "keep":
            await self._order(FlushPrefixes())
        return json_response({"status": "paused"})

    @describe("Resume all replicas, as in vLLM", answer=server_types.Status)
    async def resume(self, state: AppState, request: Request) -> Response:
        check_may_control(state, caller_of(request))
        await begin(request)
        await self._order(ResumeEngine())
        return json_response({"status": "resumed"})

    @describe("Show whether the replicas are paused, as in vLLM", answer=server_types.Paused)
    async def is_paused(self, state: AppState, request: Request) -> Response:
        check_may_load(state, caller_of(request))
        return json_response({"is_paused": state.engine.stats.paused != ""})

    @describe("Give the GPU memory of all replicas back, as in vLLM", query=SleepQuery, answer=server_types.Status)
    async def sleep(self, state: AppState, request: Request) -> Response:
        query = parse_query(request, SleepQuery)
        check_may_control(state, caller_of(request))
        await begin(request, level=query.level, mode=query.mode)
        await self._order(SleepEngine(2 if query.level == 2 else 1, query.mode))
        return json_response({"status": "asleep"})

    @describe("Take the GPU memory of all replicas again, as in vLLM", query=WakeUpQuery, answer=server_types.Awake)
    async def wake_up(self, state: AppState, request: Request) -> Response:
        query = parse_query(request, WakeUpQuery)
        check_may_control(state, caller_of(request))
        tags = ALL_MEMORY if query.tags is None else tuple(query.tags)
        await begin(request, tags=list(tags))
        num_changes = state.engine.stats.base_changes_total
        await self._order(WakeEngine(tags))
        stats = state.engine.stats  # All replicas have read the same checkpoint.
        is_changed = stats.base_changes_total > num_changes
        return json_response({"status": "awake", "base_changed": is_changed, "base_digest": stats.base_digest})

    @describe("Show whether the replicas sleep, as in vLLM", answer=server_types.Sleeping)
    async def is_sleeping(self, state: AppState, request: Request) -> Response:
        check_may_load(state, caller_of(request))
        return json_response({"is_sleeping": bool(state.engine.stats.sleeping)})

    @describe(
        "Give GPU memory of all replicas back, as in SGLang",
        body=MemoryOccupationRequest,
        answer=server_types.StatusMessage,
    )
    async def release_memory(self, state: AppState, request: Request) -> Response:
        tags = await _read_tags(state, request)
        await begin(request, tags=list(tags))
        # SGLang demands that there is no request in flight. Here none is lost.
        await self._order(SleepEngine(1, "keep", tags))
        return json_response({"status": "ok", "message": "Memory released successfully."})

    @describe(
        "Take GPU memory of all replicas again, as in SGLang",
        body=MemoryOccupationRequest,
        answer=server_types.StatusMessage,
    )
    async def resume_memory(self, state: AppState, request: Request) -> Response:
        tags = await _read_tags(state, request)
        await begin(request, tags=list(tags))
        await self._order(WakeEngine(tags))
        return json_response({"status": "ok", "message": "Memory resumed successfully."})

    @describe("Pause all replicas, as in SGLang", body=PauseGenerationRequest, answer=server_types.StatusMessage)
    async def pause_generation(self, state: AppState, request: Request) -> Response:
        body = await _read_optional(state, request, PauseGenerationRequest)
        check_may_control(state, caller_of(request))
        await begin(request, mode=body.mode)
        await self._order(PauseEngine(SGLANG_MODES[body.mode]))
        return json_response({"status": "ok", "message": "Generation paused successfully."})

    @describe("Resume all replicas, as in SGLang", body=ContinueGenerationRequest, answer=server_types.StatusMessage)
    async def continue_generation(self, state: AppState, request: Request) -> Response:
        await _read_optional(state, request, ContinueGenerationRequest)
        check_may_control(state, caller_of(request))
        await begin(request)
        await self._order(ResumeEngine())
        return json_response({"status": "ok", "message": "Generation continued successfully."})

    @describe("Abort requests on all replicas, as in SGLang", body=AbortRequest)
    async def abort_request(self, state: AppState, request: Request) -> Response:
        """Aborts the requests with this ID. A tenant's key reaches the tenant's own requests alone."""
        body = await _read_optional(state, request, AbortRequest)
        check_may_load(state, caller_of(request))
        if not body.rid and not body.abort_all:
            raise InvalidRequest("Give either `rid`, or `abort_all` with the value true.", "rid")
        await begin(request, rid=body.rid, abort_all=body.abort_all)
        prefix = "" if body.abort_all or body.rid is None else f"{body.rid}-"
        await self._order(AbortRequests(prefix, caller_of(request).tenant))
        return Response()

    @describe("Forget cached prefixes on all replicas, as in SGLang", query=FlushQuery, answer=PlainText)
    async def flush_cache(self, state: AppState, request: Request) -> Response:
        await self._flush(state, request)
        return PlainTextResponse("Cache flushed.\n")

    @describe("Forget cached prefixes on all replicas, as in vLLM", query=FlushQuery)
    async def reset_prefix_cache(self, state: AppState, request: Request) -> Response:
        await self._flush(state, request)
        return Response()

    async def _flush(self, state: AppState, request: Request) -> None:
        parse_query(request, FlushQuery)
        check_may_control(state, caller_of(request))
        await begin(request)
        await self._order(FlushPrefixes())

    async def _order(self, control: EngineControl) -> None:
        done = await self._admin.administer(ControlEngines(control))
        logger.info("%s carried out on %d replicas", type(control).__name__, len(done.replicas))


async def _read_tags(state: AppState, request: Request) -> tuple[MemoryTag, ...]:
    """Reads the parts of the memory, all by default, from the body of a caller who may control engines."""
    body = await _read_optional(state, request, MemoryOccupationRequest)
    check_may_control(state, caller_of(request))
    tags = tuple(tag for tag in ALL_MEMORY if body.tags is None or tag in body.tags)
    if not tags:
        raise InvalidRequest(
            f"`tags` must name at least one of {', '.join(ALL_MEMORY)}; CUDA graphs come and go with them.", "tags"
        )
    return tags


async def _read_optional(state: AppState, request: Request, model: type[Body]) -> Body:
    """Reads a body that may be left out."""
    is_empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    return model() if is_empty else await read_body(state, request, model)
