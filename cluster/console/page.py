"""Serves the console's page and files (GET /console) as they are in static/. There is no build step, and nothing
comes from other hosts.

The page opens without a key and shows nothing by itself. It gets its data through the API, as any client does.
"""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.app_state import AppState
from lorafleet.api.routes.build_api import Route
from lorafleet.api.routes.static_files import answer_static, read_static

STATIC = Path(__file__).parent / "static"
# The page has no inline script or style, and never builds HTML from strings: names, messages and answers are untrusted.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_FILES = {path.name: read_static(path) for path in STATIC.iterdir()}
_PAGE = _FILES.pop("index.html")


async def page(_: AppState, request: Request) -> Response:
    return answer_static(_PAGE, request, _POLICY)


async def page_elsewhere(_: AppState, __: Request) -> Response:
    """Redirects to /console, since the page's own links are relative to it, without a trailing slash."""
    return Response(status_code=308, headers={"location": "../console"})


async def file(_: AppState, request: Request) -> Response:
    found = _FILES.get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    return answer_static(found, request, _POLICY)


PAGE_ROUTES: tuple[Route, ...] = (
    ("GET", "/console", "open", page),
    ("GET", "/console/", "open", page_elsewhere),
    ("GET", "/console/{name}", "open", file),
)
