"""Serves SGLang's routes for pushes by a torch.distributed group, as Miles calls them.

The server is one member of the group, however many GPUs and replicas it has: the other replicas get the adapter from
this one. PUT /v1/adapters/NAME/tensors?group=GROUP (admin_api.py) has the options of other pushes besides.
"""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.runtime_changes import check_may_control
from lorafleet.api.access.work_threads import PUSHED_BYTES, in_turn
from lorafleet.api.answer import server_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import read_body
from lorafleet.api.request.trainer_bodies import DistributedLoadRequest, JoinGroupRequest, LeaveGroupRequest
from lorafleet.api.routes.build_api import Route
from lorafleet.api.routes.operations import describe
from lorafleet.cluster.admin.push_limits import limited_for_owner
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.admin.tensor_load_api import PLACE
from lorafleet.cluster.receiving.group_orders import GroupLeave, GroupPush
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush, read_announced
from lorafleet.protocol.adapter_formats.tensor_push import write_config
from lorafleet.protocol.admin_verbs import RECEIVE_S, PushTerms
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.weights_group_place import WeightsGroupPlace

logger = logging.getLogger("lorafleet.http")


class GroupApi:
    def __init__(self, admin: AdapterAdmin) -> None:
        self._admin = admin

    def routes(self) -> list[Route]:
        return [
            ("POST", "/init_weights_update_group", "loading", self.join),
            ("POST", "/destroy_weights_update_group", "loading", self.leave),
            ("POST", "/load_lora_adapter_from_distributed", "loading", self.load),
        ]

    @describe("Join a trainer's process group, as in SGLang", body=JoinGroupRequest, answer=server_types.GroupStatus)
    async def join(self, state: AppState, request: Request) -> Response:
        check_may_control(state, caller_of(request))
        body = await read_body(state, request, JoinGroupRequest)
        if body.rank_offset >= body.world_size:
            raise InvalidRequest(
                f"`rank_offset` is {body.rank_offset}, but the group has {body.world_size} members. The server is one "
                "member, whose rank it is.",
                "rank_offset",
            )
        place = WeightsGroupPlace(
            body.group_name,
            body.master_address,
            body.master_port,
            body.world_size,
            body.rank_offset,
            body.backend,
            body.timeout_s,
        )
        await begin(request, group=place.name, host=place.host, port=place.port, backend=place.backend)
        await self._admin.join_group(place)
        logger.info("joined the process group %s at %s:%d", place.name, place.host, place.port)
        return json_response({"success": True, "message": f"Joined the process group {place.name}."})

    @describe("Leave a trainer's process group, as in SGLang", body=LeaveGroupRequest, answer=server_types.GroupStatus)
    async def leave(self, state: AppState, request: Request) -> Response:
        check_may_control(state, caller_of(request))
        body = await read_body(state, request, LeaveGroupRequest)
        await begin(request, group=body.group_name)
        await self._admin.order_group(GroupLeave(body.group_name))
        return json_response({"success": True, "message": f"Left the process group {body.group_name}."})

    @describe(
        "Load an adapter by broadcasts in a process group, as in SGLang",
        body=DistributedLoadRequest,
        answer=server_types.LoadedAdapters,
    )
    async def load(self, state: AppState, request: Request) -> Response:
        caller = caller_of(request)
        check_may_control(state, caller)
        body = await read_body(state, request, DistributedLoadRequest)
        await begin(request, name=body.lora_name, source="distributed", group=body.group_name)
        full = state.models.catalog_of(caller).to_change(body.lora_name)
        terms = limited_for_owner(PushTerms("distributed", replace=body.upsert, num_replicas=None), state, full)
        self._admin.check_name(full)
        push = await in_turn(PUSHED_BYTES, _push_of, body)  # 20,000 tensors take 0.5 s.
        await self._admin.order_group(GroupPush(body.group_name, full, push, terms, RECEIVE_S))
        logger.info("adapter %s loaded from the process group %s", body.lora_name, body.group_name)
        return json_response({"success": True, "error_message": "", "loaded_adapters": {body.lora_name: PLACE}})


def _push_of(body: DistributedLoadRequest) -> AnnouncedPush:
    """Returns the push that three lists of one length describe. Raises InvalidRequest, AdapterMalformed and
    BodyTooLarge."""
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise InvalidRequest(
            f"`names`, `dtypes` and `shapes` have {len(body.names)}, {len(body.dtypes)} and {len(body.shapes)} "
            "entries; each must have one for each tensor.",
            "names",
        )
    entries = [
        {"name": name, "dtype": dtype.removeprefix("torch."), "shape": shape}
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    ]
    return AnnouncedPush(write_config(body.config_dict), read_announced(entries))
