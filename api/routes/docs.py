"""Serves /openapi.json, and /docs, a page that shows it and loads nothing from other sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from lorafleet.api.access.caller import Needed
from lorafleet.api.app_state import AppState
from lorafleet.api.routes.openapi import openapi

_PAGE = Path(__file__).with_name("docs.html")
_ONLY_ITS_OWN = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; frame-ancestors 'none'"
}

Routes = Sequence[tuple[str, str, Needed, Callable[..., Any]]]


def docs_routes(routes: Routes) -> list[tuple[str, str, Needed, Any]]:
    """Returns two routes for the document of `routes`. Both are open, since they reveal only what the source does."""

    @cache
    def document() -> bytes:
        return msgspec.json.encode(openapi(routes))

    async def show_openapi(_: AppState, __: Request) -> Response:
        return Response(document(), media_type="application/json")

    return [("GET", "/openapi.json", "open", show_openapi), ("GET", "/docs", "open", show_docs)]


async def show_docs(_: AppState, __: Request) -> Response:
    return HTMLResponse(_PAGE.read_bytes(), headers=_ONLY_ITS_OWN)
