"""Describes the sender of a request: its API key, its tenant, and the scopes of the key.

build_api.py sets the caller once for each request, and handlers read it with caller_of(). gate.py knows the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope as AsgiScope

Scope = Literal["infer", "admin", "metrics"]
# The access that a route needs. A scope needs a key with that scope, and "open" needs no key. "loading" needs admin if
# the server has keys, and nothing otherwise: as in vLLM, a server option enables the routes for adapters.
Needed = Literal["infer", "admin", "metrics", "loading", "open"]

_CALLER = "lorafleet.caller"  # Keys in the ASGI scope.
_INNER_CALLER = "lorafleet.inner_caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Without a tenant it sees public adapters only, unless it is the operator."""

    # ID of the tenant (names.py), which is never given again. None with the scope admin is the operator, who sees
    # everything.
    tenant: str | None = None
    # Public name of the key, for messages and logs; "" without a key. Another key may have the name later.
    key_id: str = ""
    scopes: frozenset[Scope] = frozenset()
    is_batch: bool = False  # Whether the request is a line of a batch, which starts after all other requests.
    key_mark: str = ""  # Identity of the key, which no other key ever has; "" without a key.

    @property
    def owner(self) -> str:
        """Identity of whoever owns what this caller stores. No one else is ever given it, whatever becomes of names."""
        assert bool(self.key_id) == bool(self.key_mark), f"the key {self.key_id!r} has no identity"
        if self.tenant is not None:
            return f"tenant {self.tenant!r}"
        return f"key {self.key_mark}" if self.key_mark else "clients without a key"

    @property
    def is_operator(self) -> bool:
        return self.tenant is None and "admin" in self.scopes


ANONYMOUS = Caller(scopes=frozenset(("infer", "metrics")))


def sent_key(headers: Headers) -> str | None:
    """Returns the key in `Authorization: Bearer KEY` or x-api-key, or None if there is neither.

    Another kind of authorization is returned whole, and no key matches it.
    """
    authorization = headers.get("authorization", "")
    kind, _, key = authorization.partition(" ")
    return (key if kind.lower() == "bearer" else authorization) or headers.get("x-api-key") or None


def set_inner_caller(scope: AsgiScope, caller: Caller) -> None:
    """Sets the caller of a request that the server sends itself, without a key. Only code in this process can do so,
    since clients set no values of the ASGI scope."""
    scope[_INNER_CALLER] = caller


def inner_caller(scope: AsgiScope) -> Caller | None:
    """Returns the caller of a request that the server sends itself, or None if a client has sent it."""
    return scope.get(_INNER_CALLER)


def set_caller(scope: AsgiScope, caller: Caller) -> None:
    scope[_CALLER] = caller


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope[_CALLER]
    return caller


def whose(caller: Caller) -> str:
    """Returns the tenant or key that shares a limit, as error messages name it. Nothing is stored under this text,
    since a key's name may be given to another key: see Caller.owner."""
    if caller.tenant is not None:
        return f"tenant {caller.tenant!r}"
    return f"API key {caller.key_id!r}" if caller.key_id else "clients without a key"


def caller_in(scope: AsgiScope) -> Caller:
    """Returns the caller, or ANONYMOUS if the request was rejected before its caller was known."""
    caller: Caller = scope.get(_CALLER, ANONYMOUS)
    return caller
