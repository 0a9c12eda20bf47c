"""Who sends a request: which key, of which tenant, and what the key opens. Set once by the layer in build_api.py, read
with caller_of(). Which keys there are is the gate's matter (gate.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope as AsgiScope

Scope = Literal["infer", "admin", "metrics"]
# What a route needs: a scope; or "open": no key at all; or "loading": admin where there are keys, and nothing where
# there are none, as vLLM's routes for adapters are guarded by a switch of the server.
Needed = Literal["infer", "admin", "metrics", "loading", "open"]

_CALLER = "lorafleet.caller"  # in the ASGI scope


@dataclass(frozen=True, slots=True)
class Caller:
    """tenant: None is nobody's: sees what is public; with the scope admin, the operator, who sees all. key_id: the
    key's public name, "" without one."""

    tenant: str | None = None
    key_id: str = ""
    scopes: frozenset[Scope] = frozenset()

    @property
    def is_operator(self) -> bool:
        return self.tenant is None and "admin" in self.scopes


ANONYMOUS = Caller(scopes=frozenset(("infer", "metrics")))


def sent_key(headers: Headers) -> str | None:
    """`Authorization: Bearer KEY`, or x-api-key. Another kind of authorization is given on whole: it is no key."""
    authorization = headers.get("authorization", "")
    kind, _, key = authorization.partition(" ")
    return (key if kind.lower() == "bearer" else authorization) or headers.get("x-api-key") or None


def set_caller(scope: AsgiScope, caller: Caller) -> None:
    scope[_CALLER] = caller


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[_CALLER]
    return caller


def whose(caller: Caller) -> str:
    """Whom an error message names where callers share something."""
    if caller.tenant is not None:
        return f"tenant {caller.tenant!r}"
    return f"API key {caller.key_id!r}" if caller.key_id else "clients without a key"


def caller_in(scope: AsgiScope) -> Caller:
    """Also of a request that was refused before it was known whose it is."""
    caller: Caller = scope.get(_CALLER, ANONYMOUS)
    return caller
