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

GROWING_BUDGETS = 8  # Bytes of whole answers that are being generated, relative to those of bodies.


class BodyBudget:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: Counter[str] = Counter()  # Bytes by tenant, or by key if it has no tenant.
        self._growing: Counter[str] = Counter()  # Bytes of whole answers that are being generated, likewise.

    def add(self, owner: str, num_bytes: int) -> None:
        """Counts bytes of an owner. One owner may have half of the limit.

        Raises QueueFull if the owner alone exceeds its half, and Overloaded if all owners together exceed the limit.
        """
        remedies = "Wait for one of them to end, or send less.", "Try again later."
        _check_room(self._held, owner, num_bytes, self.max_bytes, ("bodies", "in total"), remedies)
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

    def grow(self, owner: str, num_bytes: int) -> None:
        """Counts further bytes of whole answers that are being generated. Their limit is GROWING_BUDGETS times that of
        bodies, since what has been generated is lost if it is exceeded.

        Raises QueueFull if the owner alone exceeds its half, and Overloaded if all owners together exceed the limit.
        """
        most = GROWING_BUDGETS * self.max_bytes
        remedies = (
            "Ask for fewer answers or logprobs at a time, or set `stream` to true.",
            "Try again later, or set `stream` to true.",
        )
        _check_room(self._growing, owner, num_bytes, most, ("whole answers", "in total so far"), remedies)
        self._growing[owner] += num_bytes

    def remove(self, owner: str, num_bytes: int, num_grown: int = 0) -> None:
        for counted, number in ((self._held, num_bytes), (self._growing, num_grown)):
            counted[owner] -= number
            if not counted[owner]:
                del counted[owner]


def _check_room(
    counted: Counter[str], owner: str, num_bytes: int, most: int, words: tuple[str, str], remedies: tuple[str, str]
) -> None:
    """Raises QueueFull if the owner would have more than half of `most`, and Overloaded if all would have more than it.

    Args:
        words: what is counted, and how far.
        remedies: for the owner alone, and for all.
    """
    what, extent = words
    if counted[owner] + num_bytes > most // 2:
        raise QueueFull(
            f"The {what} of the requests of {owner} in progress on this replica have {counted[owner]} bytes {extent}; "
            f"at most {most // 2} are allowed. {remedies[0]}"
        )
    if counted.total() + num_bytes > most:
        raise Overloaded(
            f"The {what} of all requests in progress on this replica have {counted.total()} bytes {extent}; at most "
            f"{most} are allowed. {remedies[1]}"
        )


class HeldBody:
    """The counted bytes of one body, which are released when its request ends."""

    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, budget: BodyBudget, caller: Caller) -> None:
        self.num_bytes = 0
        self._num_grown = 0
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

    def grow(self, num_bytes: int) -> None:
        """Counts further bytes of the whole answer while it is generated. Raises the errors of BodyBudget.grow()."""
        self._budget.grow(self._owner, num_bytes)
        self._num_grown += num_bytes

    def end(self) -> None:
        self._budget.remove(self._owner, self.num_bytes, self._num_grown)
        self.num_bytes = self._num_grown = 0

    async def give_back(self, _: str) -> None:
        self.end()


def set_body(scope: Scope, body: HeldBody) -> None:
    scope[_BODY] = body


def count_with_body(scope: Scope, num_bytes: int) -> None:
    """Counts further bytes that are read for the request, as those of its body. Raises the errors of BodyBudget."""
    body: HeldBody = scope[_BODY]
    body.add(num_bytes)


def count_growth(scope: Scope, num_bytes: int) -> None:
    """Counts further bytes of the request's whole answer while it is generated. Raises the errors of
    BodyBudget.grow()."""
    body: HeldBody = scope[_BODY]
    body.grow(num_bytes)


def count_answer(scope: Scope, num_bytes: int) -> None:
    """Counts the bytes of a request's answer until it has been sent, if the request had a body. Raises QueueFull."""
    body: HeldBody | None = scope.get(_BODY)
    if body is not None:
        body.add_answer(num_bytes)


def body_bytes_of(scope: Scope) -> int:
    """Returns the number of bytes of the request's body that have been read."""
    body: HeldBody | None = scope.get(_BODY)
    return 0 if body is None else body.num_bytes
