"""Records the calls of administrators and their outcomes; cluster/tenancy/audit_log.py writes them to disk.

A handler that changes something calls begin() first. If that line cannot be written, nothing is changed.
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

MAX_TEXT_CHARS = 1024  # Limit of each text in a line; a longer text is cut, and its length is added.
_CALL = "lorafleet.audit"  # Key in the ASGI scope.


class Audited(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the audit log."""

    at_s: float  # Time of writing, in seconds since 1970.
    call: str  # ID of the call, which its two lines share.
    action: str  # Method, path and query.
    status: int = 0  # HTTP status of the answer; 0 (which is omitted) if the call begins.
    key: str = ""  # ID of the API key; "" if no known key was sent. Another key may have it later.
    key_mark: str = ""  # Identity of the API key, which no other key ever has.
    tenant: str = ""  # ID of the tenant, which no other tenant ever has.
    peer: str = ""  # Address of the caller, or of the proxy in front of it.
    forwarded_for: str = ""  # Address of the client according to the proxy.
    what: dict[str, str] = {}  # Names that the call gave in addition to its path.
    error: str = ""
    unlogged: int = 0  # Earlier rejected calls of the same key that have no line of their own.


class Audit(Protocol):
    """The audit log of administrative calls. Both methods raise LogUnwritable if the line cannot be written."""

    async def acted(self, entry: Audited) -> None:
        """Writes a line of a call that acts: the line before it acts, or the line with its outcome."""
        ...

    async def refused(self, entry: Audited) -> None:
        """Writes the line of a call that was rejected before it acted."""
        ...


class NoAudit:
    """The audit log of a server that writes none."""

    async def acted(self, entry: Audited) -> None:
        pass

    async def refused(self, entry: Audited) -> None:
        pass


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
            key_mark=caller.key_mark,
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
                f"The call ended with status {status}, but this outcome could not be written to the audit log. "
                f"{unwritten.message} Check whether the change was made before you repeat the call."
            ) from None


async def begin(request: Request, **what: object) -> None:
    """Records that the call is about to act. `what` holds names from the body, never a secret.

    Raises LogUnwritable. The caller must not act in this case.
    """
    call: _Call | None = request.scope.get(_CALL)
    if call is not None:
        call.what = {name: cut(str(value)) for name, value in what.items() if value is not None}
        await call.audit.acted(call.entry())
        call.has_begun = True


async def audited(request: Request, audit: Audit, handle: Callable[[], Awaitable[Response]]) -> Response:
    """Handles the call, and records its outcome before the client gets the answer."""
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
    """Returns the text as it may appear in a line: valid UTF-8 of bounded length, whatever the client sent."""
    sound = text.encode(errors="replace").decode()
    return sound if len(sound) <= MAX_TEXT_CHARS else f"{sound[:MAX_TEXT_CHARS]}… ({len(sound)} characters)"
