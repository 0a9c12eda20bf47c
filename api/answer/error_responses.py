"""Converts each error to an HTTP status and a body in OpenAI's or Anthropic's form, by one table for all routes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from lorafleet.api.access.caller import Caller, caller_in
from lorafleet.api.answer.anthropic_errors import anthropic_error, is_from_anthropics_client
from lorafleet.api.answer.elsewhere import MEANT_HEADER, RETRY_STATUS, may_be_elsewhere
from lorafleet.protocol.admin_verbs import VERSION_HEADER
from lorafleet.protocol.errors import (
    AdapterChanged,
    AdapterError,
    AdapterExists,
    AdapterMalformed,
    AdapterMismatch,
    AdapterMissing,
    AdapterTooLarge,
    AdapterUnavailable,
    AdapterUnsupported,
    BatchFileNotFound,
    BatchNotFound,
    BodyTimeout,
    BodyTooLarge,
    CatalogueDamaged,
    ClientTooSlow,
    ContextOverflow,
    DirectoryUnavailable,
    EngineDead,
    Forbidden,
    InvalidAdapterName,
    InvalidRequest,
    LogUnwritable,
    LorafleetError,
    ModelNotFound,
    OutcomeUnknown,
    Overloaded,
    QueueFull,
    QueueTimeout,
    QuotaExceeded,
    RankTooLarge,
    ResponseNotFound,
    StoreError,
    StoreRefused,
    Unauthorized,
    UnsupportedMediaType,
    UnsupportedRoute,
    WeightVersionMismatch,
    encodable,
)
from lorafleet.protocol.limits import cut
from lorafleet.protocol.names import in_the_words_of

logger = logging.getLogger("lorafleet.http")


class HttpError(NamedTuple):
    status: int
    type: str
    code: str | None


def in_own_words(error: InvalidRequest, fields: Mapping[str, str]) -> InvalidRequest:
    """Replaces the field's name in the error of a check that several APIs share.

    `fields` maps each name that the check uses to the request's own name.
    """
    field_name, dot, rest = (error.param or "").partition(".")
    if field_name not in fields:
        return error
    own = fields[field_name]
    return type(error)(error.message.replace(field_name, own), own + dot + rest)


SERVER_FAILED = "The server failed to answer; its log says why."
STORE_FAILED = (
    "The server's store failed; the server's log has the details. Check whether your change was made before you "
    "repeat it, and tell the operator if the error persists."
)
_INVALID = "invalid_request_error"
TABLE: dict[type[LorafleetError], HttpError] = {
    LorafleetError: HttpError(500, "server_error", "internal_error"),
    InvalidRequest: HttpError(400, _INVALID, None),
    BodyTooLarge: HttpError(413, _INVALID, "body_too_large"),
    BodyTimeout: HttpError(408, _INVALID, "body_timeout"),
    UnsupportedMediaType: HttpError(415, _INVALID, "unsupported_media_type"),
    UnsupportedRoute: HttpError(400, _INVALID, "unsupported_route"),
    ContextOverflow: HttpError(400, _INVALID, "context_length_exceeded"),
    ResponseNotFound: HttpError(404, _INVALID, "response_not_found"),
    BatchFileNotFound: HttpError(404, _INVALID, "file_not_found"),
    BatchNotFound: HttpError(404, _INVALID, "batch_not_found"),
    ModelNotFound: HttpError(404, _INVALID, "model_not_found"),
    WeightVersionMismatch: HttpError(409, _INVALID, "weight_version_mismatch"),
    Forbidden: HttpError(403, "permission_error", "forbidden"),
    Unauthorized: HttpError(401, "authentication_error", "invalid_api_key"),
    AdapterError: HttpError(400, _INVALID, "adapter_error"),
    AdapterMissing: HttpError(404, _INVALID, "adapter_missing"),
    AdapterMalformed: HttpError(400, _INVALID, "adapter_malformed"),
    AdapterUnsupported: HttpError(400, _INVALID, "adapter_unsupported"),
    AdapterMismatch: HttpError(400, _INVALID, "adapter_mismatch"),
    RankTooLarge: HttpError(400, _INVALID, "rank_too_large"),
    AdapterChanged: HttpError(409, _INVALID, "adapter_changed"),
    AdapterTooLarge: HttpError(400, _INVALID, "adapter_too_large"),
    AdapterUnavailable: HttpError(503, "server_error", "adapter_unavailable"),
    AdapterExists: HttpError(400, _INVALID, "adapter_exists"),
    InvalidAdapterName: HttpError(400, _INVALID, "invalid_adapter_name"),
    Overloaded: HttpError(503, "server_error", "overloaded"),
    DirectoryUnavailable: HttpError(503, "server_error", "directory_unavailable"),
    QueueFull: HttpError(429, "rate_limit_error", "queue_full"),
    QuotaExceeded: HttpError(429, "rate_limit_error", "rate_limit_exceeded"),
    QueueTimeout: HttpError(429, "rate_limit_error", "queue_timeout"),
    LogUnwritable: HttpError(503, "server_error", "store_error"),
    StoreError: HttpError(503, "server_error", "store_error"),
    StoreRefused: HttpError(503, "server_error", "store_error"),
    OutcomeUnknown: HttpError(503, "server_error", "store_error"),
    CatalogueDamaged: HttpError(500, "server_error", "catalogue_damaged"),
    ClientTooSlow: HttpError(408, _INVALID, "client_too_slow"),
    EngineDead: HttpError(503, "server_error", "engine_dead"),
}


def http_error(error: LorafleetError) -> HttpError:
    """Returns the entry of the error's nearest class in the hierarchy."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_body(error: LorafleetError, scope: Scope) -> bytes:
    """Returns the JSON body of an error, worded for the caller of the request that `scope` belongs to."""
    kind, caller = http_error(error), caller_in(scope)
    return _body(scope, _in_words_for(caller, error), kind, error.param)


def _in_words_for(caller: Caller, error: LorafleetError) -> str:
    if caller.is_operator:
        return error.message
    if isinstance(error, StoreError) and caller.key_id:  # The message names folders, buckets and objects.
        logger.error("a request with key %r failed with %s: %s", caller.key_id, type(error).__name__, error.message)
        return STORE_FAILED
    return in_the_words_of(caller.tenant, error.message)


def error_response(error: LorafleetError, scope: Scope) -> Response:
    status = http_error(error).status
    headers = None
    if isinstance(error, Overloaded):
        wait_s = error.retry_after_s
        headers = {} if wait_s is None else {"retry-after": str(max(1, math.ceil(wait_s)))}
        if isinstance(error, QuotaExceeded):
            headers |= error.headers
    elif isinstance(error, WeightVersionMismatch):
        headers = {VERSION_HEADER: str(error.present)}
    elif status == 401:
        headers = {"www-authenticate": "Bearer"}
    elif status == 503:
        headers = {"retry-after": "1"}
    if may_be_elsewhere(error, scope):
        headers = {**(headers or {}), MEANT_HEADER: str(status)}
        status = RETRY_STATUS
    return Response(error_body(error, scope), status, headers, media_type="application/json")


def error_event(error: LorafleetError, scope: Scope) -> bytes:
    """Returns the last event of a stream that fails."""
    name = b"event: error\n" if is_from_anthropics_client(scope) else b""
    return name + b"data: " + error_body(error, scope) + b"\n\n"


def internal_error_response(scope: Scope) -> Response:
    body = _body(scope, SERVER_FAILED, TABLE[LorafleetError], None)
    return Response(body, 500, media_type="application/json")


async def on_lorafleet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LorafleetError)
    return error_response(error, request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answers unknown paths and methods, which the router itself rejects."""
    assert isinstance(error, HTTPException)
    what = f"{cut(request.method)} {cut(request.url.path)}"
    message, code = {
        404: (f"This server has no route for {what}.", "unknown_url"),
        405: (f"{what} is not allowed; see the Allow header.", "method_not_supported"),
    }.get(error.status_code, (str(error.detail), None))
    headers = dict(error.headers) if error.headers else {}
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods_of(request)))
    body = _body(request.scope, message, HttpError(error.status_code, _INVALID, code), None)
    return Response(body, error.status_code, headers, media_type="application/json")


def _methods_of(request: Request) -> set[str]:
    """Returns the methods of all routes of this path, because the router's own Allow has only the first route's."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods
    return found


def _body(scope: Scope, message: str, kind: HttpError, param: str | None) -> bytes:
    if is_from_anthropics_client(scope):
        return anthropic_error(kind.status, message)
    error = {"message": encodable(message), "type": kind.type, "param": param, "code": kind.code}
    return msgspec.json.encode({"error": error})
