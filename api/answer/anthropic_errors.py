"""Writes errors in the form of Anthropic's API, for the routes that serve it."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from lorafleet.protocol.errors import encodable

ANTHROPIC_PATH = "/v1/messages"
# Anthropic's types by status. The statuses are those of all routes.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def is_from_anthropics_client(scope: Scope) -> bool:
    return speaks_anthropic(scope["path"])


def anthropic_error(status: int, message: str) -> bytes:
    """Returns the JSON body of an error. Its message names the field, as Anthropic's form has no place for it."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": encodable(message)}})
