"""How many bytes the bodies of requests under way may have together on this replica, and of those one tenant's.

A body counts from its first byte until its request is answered, since what was parsed of it lives as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from starlette.types import Scope

from lorafleet.api.access.caller import Caller, whose
from lorafleet.protocol.errors import Overloaded, QueueFull

_BODY = "lorafleet.body"  # in the ASGI scope


class BodyBudget:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()  # by tenant, or by key where it has none

    def add(self, owner: str, num_bytes: int) -> None:
        """Raises QueueFull where the owner alone has too much, and Overloaded where all together have."""
        if self._held[owner] + num_bytes > self._max_bytes // 2:
            raise QueueFull(
                f"The bodies of the requests of {owner} that are under way on this replica have {self._held[owner]} "
                f"bytes, and may have {self._max_bytes // 2} together. Wait for one of them to end, or send less."
            )
        if self._held.total() + num_bytes > self._max_bytes:
            raise Overloaded(
                f"The bodies of all requests that are under way on this replica have {self._held.total()} bytes, and "
                f"may have {self._max_bytes} together. Try again later."
            )
        self._held[owner] += num_bytes

    def remove(self, owner: str, num_bytes: int) -> None:
        self._held[owner] -= num_bytes
        if not self._held[owner]:
            del self._held[owner]


class HeldBody:
    """The bytes of one body, given back when its request ends."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, budget: BodyBudget, caller: Caller) -> None:
        self.num_bytes = 0
        self._budget = budget
        self._owner = whose(caller)

    def add(self, num_bytes: int) -> None:
        """Raises as BodyBudget.add() does."""
        self._budget.add(self._owner, num_bytes)
        self.num_bytes += num_bytes

    def end(self) -> None:
        self._budget.remove(self._owner, self.num_bytes)
        self.num_bytes = 0

    async def give_back(self, _: str) -> None:
        self.end()


def set_body(scope: Scope, body: HeldBody) -> None:
    scope[_BODY] = body


def body_bytes_of(scope: Scope) -> int:
    """The size of the request's body as far as it was read."""
    body: HeldBody | None = scope.get(_BODY)
    return 0 if body is None else body.num_bytes
