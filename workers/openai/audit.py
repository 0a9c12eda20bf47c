"""What an administrator asked for and what came of it, as the API saw it; cluster/tenancy/audit_log.py keeps it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.workers.errors import LorafleetError
from lorafleet.workers.openai.caller import caller_in
from lorafleet.workers.openai.errors import http_error

_NOTES = "lorafleet.audit"  # in the ASGI scope


class Audited(msgspec.Struct, frozen=True, omit_defaults=True):
    """at_s: since 1970. key, tenant: who, "" where no known key was sent. peer: the address that called; behind a proxy
    that is the proxy, and forwarded_for what it says of the client. what: names the call gave besides its path."""

    at_s: float
    action: str
    status: int
    key: str = ""
    tenant: str = ""
    peer: str = ""
    forwarded_for: str = ""
    what: dict[str, str] = {}
    error: str = ""


Audit = Callable[[Audited], Awaitable[None]]


def note(request: Request, **what: object) -> None:
    """For the audit log: names that the body gave. Never a secret."""
    request.scope.setdefault(_NOTES, {}).update({name: str(value) for name, value in what.items() if value is not None})


async def audited(request: Request, audit: Audit, handle: Callable[[], Awaitable[Response]]) -> Response:
    """Does it, and says what came of it before the caller hears it."""
    try:
        response = await handle()
    except LorafleetError as error:
        kind = http_error(error)
        await audit(_entry(request, kind.status, kind.code or type(error).__name__))
        raise
    except BaseException as error:
        await audit(_entry(request, 500, type(error).__name__))
        raise
    await audit(_entry(request, response.status_code, ""))
    return response


def _entry(request: Request, status: int, error: str) -> Audited:
    caller = caller_in(request.scope)
    query = f"?{request.url.query}" if request.url.query else ""
    return Audited(
        time.time(),
        f"{request.method} {request.url.path}{query}",
        status,
        caller.key_id,
        caller.tenant or "",
        request.client.host if request.client is not None else "",
        request.headers.get("x-forwarded-for", ""),
        request.scope.get(_NOTES, {}),
        error,
    )
