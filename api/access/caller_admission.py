"""Admits requests within their caller's limits, and reports what remains of these limits.

Every request with a key is admitted before its body is read. A generation is admitted again once its sequences and
prompts are known (make_samples in generation.py). cluster/tenancy/ counts for the whole cluster. WorkBounds applies
to this replica, with or without keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from starlette.types import Scope

from lorafleet.api.access.caller import Caller, whose
from lorafleet.protocol.errors import QueueFull

# In-flight requests per route and tenant (or key without a tenant) that count or convert tokens or query all replicas.
MAX_AUXILIARY = 16
MAX_UPLOADS = 4  # In-flight uploads per tenant (or key without a tenant); each may take 16 GiB of disk.

# The purpose of a request. Administration includes /metrics. Each kind except "auxiliary" has a rate limit of its own,
# so that a tenant whose generations have used up their limit can still roll back a version.
Kind = Literal["generation", "auxiliary", "administration"]

_ADMISSIONS = "lorafleet.admissions"  # Key in the ASGI scope.


class CallerAdmission(Protocol):
    """The admission of one request, which counts as in-flight until end()."""

    @property
    def headers(self) -> Mapping[str, str]:
        """OpenAI's x-ratelimit headers for the answer."""
        ...

    def end(self) -> None:
        """Ends the admission because the request was answered or aborted."""
        ...

    def give_back(self, retry_id: str, /) -> Awaitable[None]:
        """Ends the admission and refunds its charge, because another replica will charge the request again.

        `retry_id` identifies the request at both replicas. Only the first replica refunds anything, so that a request
        that no replica answers is charged once.
        """
        ...


class Quotas(Protocol):
    async def admit_request(self, caller: Caller, kind: Kind) -> CallerAdmission | None:
        """Counts one request of the caller. Returns None if the caller has no limits. Raises QuotaExceeded."""
        ...

    async def admit_sequences(
        self, caller: Caller, num_sequences: int, num_prompt_tokens: int
    ) -> CallerAdmission | None:
        """Counts the sequences of a request that admit_request() has counted as one. Raises QuotaExceeded."""
        ...

    def charge(self, caller: Caller, num_tokens: int) -> None:
        """Charges the tokens of an answer. A negative number refunds the prompt of a sequence that did not start."""
        ...

    def charge_auxiliary(self, caller: Caller, num_tokens: int) -> None:
        """Charges tokens that were only counted or converted, if the caller's limits include them."""
        ...


class NoQuotas:
    """The quotas of a server without keys: there are none."""

    async def admit_request(self, caller: Caller, kind: Kind) -> None:
        pass

    async def admit_sequences(self, caller: Caller, num_sequences: int, num_prompt_tokens: int) -> None:
        pass

    def charge(self, caller: Caller, num_tokens: int) -> None:
        pass

    def charge_auxiliary(self, caller: Caller, num_tokens: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Entered:
    end: Callable[[], None]
    headers: Mapping[str, str] = field(default_factory=dict)

    async def give_back(self, _: str) -> None:
        self.end()


def ending_with_request(end: Callable[[], None]) -> CallerAdmission:
    """Returns an admission that only calls `end` when the request has ended."""
    return _Entered(end)


class WorkBounds:
    """Limits each caller's in-flight requests of an expensive kind on this replica.

    The body of a rejected request is not read.
    """

    def __init__(self) -> None:
        self._under_way: Counter[tuple[str, str]] = Counter()  # By route and caller.

    def enter(self, what: str, most: int, caller: Caller) -> CallerAdmission:
        """Admits a request of the kind `what`. Raises QueueFull if the caller has `most` of them in flight."""
        entry = (what, whose(caller))
        if self._under_way[entry] >= most:
            raise QueueFull(
                f"{most} requests of {entry[1]} for {what} are in progress on this replica; at most {most} are "
                "allowed at a time. Wait for one of them to end."
            )
        self._under_way[entry] += 1
        return _Entered(lambda: self._leave(entry))

    def _leave(self, entry: tuple[str, str]) -> None:
        self._under_way[entry] -= 1
        if not self._under_way[entry]:
            del self._under_way[entry]


def detach_admissions(scope: Scope) -> list[CallerAdmission]:
    """Returns the request's admissions, which then do not end with the request. Its answer still has their headers."""
    taken = admissions_of(scope)
    scope[_ADMISSIONS] = [_Entered(lambda: None, dict(admission.headers)) for admission in taken]
    return taken


def add_admission(scope: Scope, admission: CallerAdmission | None) -> None:
    """Adds the admission to those that end with the request. None is the admission of a caller without limits."""
    if admission is not None:
        scope.setdefault(_ADMISSIONS, []).append(admission)


async def give_back(scope: Scope, retry_id: str) -> None:
    """Refunds the admissions of a request that is sent to another replica."""
    for i, admission in enumerate(scope.pop(_ADMISSIONS, [])):
        await admission.give_back(f"{retry_id} {i}")


def admissions_of(scope: Scope) -> list[CallerAdmission]:
    """Returns the request's admissions in the order in which they were granted."""
    admissions: list[CallerAdmission] = scope.get(_ADMISSIONS, [])
    return admissions
