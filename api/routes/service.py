"""Serves /health, /ping, /version and /metrics, with which a server describes itself, and /finish_session."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from lorafleet import __version__
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.work_threads import CHECKS, in_turn
from lorafleet.api.answer import server_types
from lorafleet.api.answer.responses import json_response
from lorafleet.api.app_state import AppState
from lorafleet.api.request.parsing import parse_query
from lorafleet.api.request.trainer_bodies import FinishSessionQuery
from lorafleet.api.routes.operations import PlainText, describe
from lorafleet.api.telemetry.tenant_metrics import of_tenant
from lorafleet.protocol.errors import EngineDead


@describe("Check whether the replica can answer")
async def health(state: AppState, _: Request) -> Response:
    if state.engine.dead is not None:
        raise EngineDead(f"The engine stopped: {state.engine.dead}. This replica is being replaced; try again.")
    return Response()


@describe("Show the server's version", answer=server_types.ServerVersion)
async def version(_: AppState, __: Request) -> Response:
    return json_response({"version": __version__})


@describe("Accept the end of a session, as SkyRL's router does", query=FinishSessionQuery)
async def finish_session(_: AppState, request: Request) -> Response:
    """Nothing is held for a session: requests go where their prompt's prefix is cached."""
    parse_query(request, FinishSessionQuery)
    return Response()


@describe("Show the metrics, in Prometheus' format", answer=PlainText)
async def metrics(state: AppState, request: Request) -> Response:
    text = await state.telemetry.scrape()
    tenant = caller_of(request).tenant
    if tenant is not None:
        text = await in_turn(CHECKS, of_tenant, text, tenant)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
