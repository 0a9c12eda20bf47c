"""Serves files that never change while the process runs. Browsers cache them, but revalidate them by their ETag each
time, so that files of two releases never mix."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class StaticFile(NamedTuple):
    content: bytes
    etag: str
    media_type: str


def read_static(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, f'"{hashlib.sha256(content).hexdigest()[:20]}"', _TYPES[path.suffix])


def answer_static(file: StaticFile, request: Request, policy: str) -> Response:
    """Answers with the file, or with 304 if the client has it. `policy` is its Content-Security-Policy."""
    headers: Mapping[str, str] = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
        "etag": file.etag,
    }
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
