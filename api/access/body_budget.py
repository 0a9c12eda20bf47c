"""Limits the bytes that the bodies and answers of in-flight requests may have on this replica, together and per tenant.

A body counts from its first byte until its request is answered, because its parsed content lives as long. A whole
answer counts while it is sent, which takes as long as its client likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from starlette.types import Scope

from lorafleet.api.access.caller import Caller, whose
from lorafleet.protocol.errors import Overloaded, QueueFull

_BODY = "lorafleet.body"  # Key in the ASGI scope.


class BodyBudget:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: Counter[str] = Counter()  # Bytes by tenant, or by key if it has no tenant.

    def add(self, owner: str, num_bytes: int) -> None:
        """Counts bytes of an owner. One owner may have half of the limit.

        Raises QueueFull if the owner alone exceeds its half, and Overloaded if all owners together exceed the limit.
        """
        if self._held[owner] + num_bytes > self.max_bytes // 2:
            raise QueueFull(
                f"The bodies of the requests of {owner} in progress on this replica, and their whole answers so far, "
                f"have {self._held[owner]} bytes in total; at most {self.max_bytes // 2} are allowed. Wait for one of "
                "them to end, send less, or ask for fewer answers or logprobs at a time."
            )
        if self._held.total() + num_bytes > self.max_bytes:
            raise Overloaded(
                f"The bodies and whole answers of all requests in progress on this replica have {self._held.total()} "
                f"bytes in total; at most {self.max_bytes} are allowed. Try again later."
            )
        self._held[owner] += num_bytes

    def add_answer(self, owner: str, num_bytes: int) -> None:
        """Counts the bytes of a whole answer that is about to be sent. An answer of any size is allowed while the owner
        is within its half. Raises QueueFull otherwise."""
        if self._held[owner] > self.max_bytes // 2:
            raise QueueFull(
                f"The bodies and answers of the requests of {owner} in progress on this replica have "
                f"{self._held[owner]} bytes in total, and another answer is allowed only with at most "
                f"{self.max_bytes // 2}. Read your answers, or send fewer requests at a time."
            )
        self._held[owner] += num_bytes

    def remove(self, owner: str, num_bytes: int) -> None:
        self._held[owner] -= num_bytes
        if not self._held[owner]:
            del self._held[owner]


class HeldBody:
    """The counted bytes of one body, which are released when its request ends."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, budget: BodyBudget, caller: Caller) -> None:
        self.num_bytes = 0
        self._budget = budget
        self._owner = whose(caller)

    def add(self, num_bytes: int) -> None:
        """Counts more bytes of the body. Raises the same errors as BodyBudget.add()."""
        self._budget.add(self._owner, num_bytes)
        self.num_bytes += num_bytes

    def add_answer(self, num_bytes: int) -> None:
        """Counts the bytes of the answer too. Raises QueueFull."""
        self._budget.add_answer(self._owner, num_bytes)
        self.num_bytes += num_bytes

    def end(self) -> None:
        self._budget.remove(self._owner, self.num_bytes)
        self.num_bytes = 0

    async def give_back(self, _: str) -> None:
        self.end()


def set_body(scope: Scope, body: HeldBody) -> None:
    scope[_BODY] = body


def count_with_body(scope: Scope, num_bytes: int) -> None:
    """Counts further bytes that are read or kept for the request, as those of its body. Raises the errors of
    BodyBudget."""
    body: HeldBody = scope[_BODY]
    body.add(num_bytes)


def count_answer(scope: Scope, num_bytes: int) -> None:
    """Counts the bytes of a request's answer until it has been sent, if the request had a body. Raises QueueFull."""
    body: HeldBody | None = scope.get(_BODY)
    if body is not None:
        body.add_answer(num_bytes)


def body_bytes_of(scope: Scope) -> int:
    """Returns the number of bytes of the request's body that have been read."""
    body: HeldBody | None = scope.get(_BODY)
    return 0 if body is None else body.num_bytes
