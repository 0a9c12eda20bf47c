"""Serves /openapi.json, and /docs: Swagger UI on that document.

Swagger UI's files come from the installed package fastapi-offline, so that the page loads nothing from other sites.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import Needed
from lorafleet.api.app_state import AppState
from lorafleet.api.routes.openapi import openapi
from lorafleet.api.routes.static_files import StaticFile, answer_static, read_static

_OURS = Path(__file__).with_name("docs_page")
_SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css")
# Swagger UI sets styles on its elements, and its style sheet holds images as data.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

Routes = Sequence[tuple[str, str, Needed, Callable[..., Any]]]


def docs_routes(routes: Routes) -> list[tuple[str, str, Needed, Any]]:
    """Returns the routes that document `routes`. All are open, since they reveal only what the source does."""

    @cache
    def document() -> bytes:
        return msgspec.json.encode(openapi(routes))

    async def show_openapi(_: AppState, __: Request) -> Response:
        return Response(document(), media_type="application/json")

    return [
        ("GET", "/openapi.json", "open", show_openapi),
        ("GET", "/docs", "open", show_docs),
        ("GET", "/docs/{name}", "open", show_docs_file),
    ]


async def show_docs(_: AppState, request: Request) -> Response:
    return answer_static(_files()["index.html"], request, _POLICY)


async def show_docs_file(_: AppState, request: Request) -> Response:
    file = _files().get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return answer_static(file, request, _POLICY)


@cache
def _files() -> dict[str, StaticFile]:
    spec = importlib.util.find_spec("fastapi_offline")  # It is not imported, since that would bring FastAPI along.
    assert spec is not None and spec.origin is not None, "fastapi-offline is a dependency of this package"
    vendored = Path(spec.origin).with_name("static")
    paths = [*_OURS.iterdir(), *(vendored / name for name in _SWAGGER_UI)]
    return {path.name: read_static(path) for path in paths}
