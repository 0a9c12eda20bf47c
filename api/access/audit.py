"""What an administrator asks for and what comes of it, as the API sees it; cluster/tenancy/audit_log.py writes it down.

A handler that changes something calls begin() before it does: where that cannot be written, nothing is done.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lorafleet.api.access.caller import caller_in
from lorafleet.api.answer.error_responses import http_error
from lorafleet.protocol.errors import LogUnwritable, LorafleetError

MAX_TEXT_CHARS = 1024  # Of each text in a line; the rest is cut off, and the line says how much that was.
_CALL = "lorafleet.audit"  # in the ASGI scope


class Audited(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the audit log."""

    at_s: float  # When it was written, in seconds since 1970.
    call: str  # The same in the two lines of a call.
    action: str
    status: int = 0  # The HTTP status of the answer; 0, which is left out: the call begins.
    key: str = ""  # The key's id; "" where no known key was sent.
    tenant: str = ""
    peer: str = ""  # The address that called; behind a proxy that is the proxy.
    forwarded_for: str = ""  # What the proxy says of the client.
    what: dict[str, str] = {}  # Names that the call gave besides its path.
    error: str = ""
    unlogged: int = 0  # Earlier refusals of the same key that have no line of their own.


class Audit(Protocol):
    """Both raise LogUnwritable where the line cannot be written."""

    async def acted(self, entry: Audited) -> None:
        """Writes a line of a call that acts: the one before it does, or the one with its outcome."""
        ...

    async def refused(self, entry: Audited) -> None:
        """Writes the line of a call that was refused before it acted."""
        ...


@dataclass(slots=True)
class _Call:
    audit: Audit
    request: Request
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    has_begun: bool = False
    what: dict[str, str] = field(default_factory=dict)

    def entry(self, status: int = 0, error: str = "") -> Audited:
        request, caller = self.request, caller_in(self.request.scope)
        query = f"?{request.url.query}" if request.url.query else ""
        return Audited(
            at_s=time.time(),
            call=self.id,
            action=cut(f"{request.method} {request.url.path}{query}"),
            status=status,
            key=caller.key_id,
            tenant=caller.tenant or "",
            peer=request.client.host if request.client is not None else "",
            forwarded_for=cut(request.headers.get("x-forwarded-for", "")),
            what=self.what,
            error=error,
        )

    async def end(self, status: int, error: str = "") -> None:
        entry = self.entry(status, error)
        if not self.has_begun:
            await self.audit.refused(entry)
            return
        try:
            await self.audit.acted(entry)
        except LogUnwritable as unwritten:
            raise LogUnwritable(
                f"The call has ended with status {status}, and this could not be written down. {unwritten.message} "
                "Look whether it was done before you repeat it."
            ) from None


async def begin(request: Request, **what: object) -> None:
    """Writes down what is about to be done. what: names that the body gave, never a secret. Raises LogUnwritable,
    and then the caller must not act."""
    call: _Call | None = request.scope.get(_CALL)
    if call is not None:
        call.what = {name: cut(str(value)) for name, value in what.items() if value is not None}
        await call.audit.acted(call.entry())
        call.has_begun = True


async def audited(request: Request, audit: Audit, handle: Callable[[], Awaitable[Response]]) -> Response:
    """Does it, and writes down what came of it before the caller hears it."""
    call = request.scope[_CALL] = _Call(audit, request)
    try:
        response = await handle()
    except LorafleetError as error:
        kind = http_error(error)
        await call.end(kind.status, kind.code or type(error).__name__)
        raise
    except BaseException as error:
        await call.end(500, type(error).__name__)
        raise
    assert call.has_begun, f"{request.method} {request.url.path} has acted without audit.begin()"
    await call.end(response.status_code)
    return response


def cut(text: str) -> str:
    """The text as it may be in a line: of a bounded length, and in any encoding that a client could send."""
    sound = text.encode(errors="replace").decode()
    return sound if len(sound) <= MAX_TEXT_CHARS else f"{sound[:MAX_TEXT_CHARS]}… ({len(sound)} characters)"
