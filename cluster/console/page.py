"""Serves the console's page and files (GET /console) as they are in static/. There is no build step, and nothing
comes from other hosts.

The page opens without a key and shows nothing by itself. It gets its data through the API, as any client does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.app_state import AppState
from lorafleet.api.routes.build_api import Route

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
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
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser caches files but revalidates them each time, so that files of two releases never mix.
    "cache-control": "no-cache",
}


class _File(NamedTuple):
    content: bytes
    etag: str
    media_type: str


def _read() -> dict[str, _File]:
    files = {}
    for path in STATIC.iterdir():
        content = path.read_bytes()
        files[path.name] = _File(content, f'"{hashlib.sha256(content).hexdigest()[:20]}"', _TYPES[path.suffix])
    return files


_FILES = _read()
_PAGE = _FILES.pop("index.html")


async def page(_: AppState, request: Request) -> Response:
    return _answer(_PAGE, request)


async def page_elsewhere(_: AppState, __: Request) -> Response:
    """Redirects to /console, since the page's own links are relative to it, without a trailing slash."""
    return Response(status_code=308, headers={"location": "../console"})


async def file(_: AppState, request: Request) -> Response:
    found = _FILES.get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    return _answer(found, request)


def _answer(found: _File, request: Request) -> Response:
    headers = {**_HEADERS, "etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)


PAGE_ROUTES: tuple[Route, ...] = (
    ("GET", "/console", "open", page),
    ("GET", "/console/", "open", page_elsewhere),
    ("GET", "/console/{name}", "open", file),
)
