"""Serves /v1/quality, which compares models with their baselines, for the operator's key.

GET   /v1/quality                the last run of every set of probes
POST  /v1/quality/MODEL/run      runs it now
POST  /v1/quality/MODEL/accept   runs it now, and makes the result the new baseline
"""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import ConfigDict, with_config
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from lorafleet.api.access.audit import begin
from lorafleet.api.access.caller import caller_of
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.fields import Strict
from lorafleet.api.request.parsing import read_body
from lorafleet.api.routes.build_api import Route
from lorafleet.api.routes.operations import describe
from lorafleet.cluster.quality.monitor import QualityMonitor
from lorafleet.cluster.quality.quality_records import Standing
from lorafleet.protocol.errors import Forbidden

_exactly = with_config(ConfigDict(extra="forbid"))


class EmptyRequest(Strict):
    pass


@_exactly
class ShownMeasures(TypedDict):
    agreement: float
    drift: float
    kl: float
    perplexity: float | None
    baseline_perplexity: float | None


@_exactly
class ShownStanding(TypedDict):
    """The standing of one model's probes. The measures are of the last run that did not fail, and null before there
    was one."""

    id: str
    object: Literal["quality"]
    tried_s: float  # Start of the last try, in seconds since 1970.
    error: str  # Of the last try; "" if it did not fail.
    at_s: float | None
    digest: str
    baseline_digest: str
    baseline_at_s: float | None
    measures: ShownMeasures | None


@_exactly
class StandingList(TypedDict):
    object: Literal["list"]
    data: list[ShownStanding]


class QualityApi:
    def __init__(self, monitor: QualityMonitor) -> None:
        self._monitor = monitor

    def routes(self) -> list[Route]:
        model = "/v1/quality/{name:path}"
        return [
            ("GET", "/v1/quality", "admin", self.show),
            ("POST", f"{model}/run", "admin", self.run),
            ("POST", f"{model}/accept", "admin", self.accept),
        ]

    @describe("List the last comparison of each model with its baseline", answer=StandingList)
    async def show(self, _: AppState, request: Request) -> Response:
        _check_operator(request)
        return json_response({"object": "list", "data": [_shown(standing) for standing in await self._monitor.show()]})

    @describe("Run a model's quality probes", body=EmptyRequest, answer=ShownStanding)
    async def run(self, state: AppState, request: Request) -> Response:
        return await self._run(state, request, accept=False)

    @describe(
        "Run a model's quality probes and make the result its new baseline", body=EmptyRequest, answer=ShownStanding
    )
    async def accept(self, state: AppState, request: Request) -> Response:
        return await self._run(state, request, accept=True)

    async def _run(self, state: AppState, request: Request, *, accept: bool) -> Response:
        await read_body(state, request, EmptyRequest)
        _check_operator(request)
        await begin(request)
        return json_response(_shown(await self._monitor.run(str(request.path_params["name"]), accept=accept)))


def _check_operator(request: Request) -> None:
    """Raises Forbidden unless the caller is the operator, who owns the probes and the models' answers to them."""
    if not caller_of(request).is_operator:
        raise Forbidden("Quality probes need the operator's key, one with the scope admin that belongs to no tenant.")


def _shown(standing: Standing) -> dict[str, object]:
    values = {name: getattr(standing, name) for name in standing.__struct_fields__ if name not in ("model", "measures")}
    measures = None if standing.measures is None else msgspec.to_builtins(standing.measures)
    return {"id": standing.model, "object": "quality", **values, "measures": measures}
