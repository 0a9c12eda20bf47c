"""Whether a caller may have one more request answered, and what it has left.

Every request with a key is admitted before its body is read, and a generation again once its sequences and prompts are
known (make_samples in generation.py). cluster/tenancy/ counts for the whole cluster; WorkBounds holds on this replica,
with keys or without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from starlette.types import Scope

from lorafleet.api.access.caller import Caller, whose
from lorafleet.protocol.errors import QueueFull

# Requests of a tenant, or of a key without one, that count or convert tokens, or ask all replicas, at a time.
MAX_AUXILIARY = 16
MAX_UPLOADS = 4  # Uploads of a tenant, or of a key without one, at a time: each may take 16 GiB of the disk.

# What a request is for. Administration includes /metrics. Each kind but "auxiliary" has a bucket of its own, so that
# a tenant whose generations have used theirs up can still roll a version back.
Kind = Literal["generation", "auxiliary", "administration"]

_ADMISSIONS = "lorafleet.admissions"  # in the ASGI scope


class Admission(Protocol):
    """Of one request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """OpenAI's x-ratelimit headers."""
        ...

    def end(self) -> None:
        """The request is answered, or broken off."""
        ...

    def give_back(self, retry_id: str, /) -> Awaitable[None]:
        """Ends it, and takes back what it was charged: another replica is asked, which charges it too. retry_id: the
        request's, at both replicas. Only the first of them gives anything back, so that a request that no replica
        answers is charged once."""
        ...


class Quotas(Protocol):
    async def admit_request(self, caller: Caller, kind: Kind) -> Admission | None:
        """Counts one request. None where nothing of the caller's is limited. Raises QuotaExceeded."""
        ...

    async def admit_sequences(self, caller: Caller, num_sequences: int, num_prompt_tokens: int) -> Admission | None:
        """Counts the sequences of a request that admit_request has counted as one. Raises QuotaExceeded."""
        ...

    def charge(self, caller: Caller, num_tokens: int) -> None:
        """Counts tokens that were answered."""
        ...

    def charge_auxiliary(self, caller: Caller, num_tokens: int) -> None:
        """Counts tokens that were only counted or converted, where the caller's limits say so."""
        ...


@dataclass(frozen=True, slots=True)
class _Entered:
    end: Callable[[], None]
    headers: Mapping[str, str] = field(default_factory=dict)

    async def give_back(self, _: str) -> None:
        self.end()


class WorkBounds:
    """How many requests of an expensive kind each caller has under way on this replica. The body of one that is refused
    is not read."""

    def __init__(self) -> None:
        self._under_way: Counter[tuple[str, str]] = Counter()  # by route and caller

    def enter(self, what: str, most: int, caller: Caller) -> Admission:
        """Raises QueueFull."""
        entry = (what, whose(caller))
        if self._under_way[entry] >= most:
            raise QueueFull(
                f"{most} requests of {entry[1]} for {what} are under way on this replica, and no more may be at a "
                "time. Wait for one of them to end."
            )
        self._under_way[entry] += 1
        return _Entered(lambda: self._leave(entry))

    def _leave(self, entry: tuple[str, str]) -> None:
        self._under_way[entry] -= 1
        if not self._under_way[entry]:
            del self._under_way[entry]


def add_admission(scope: Scope, admission: Admission) -> None:
    scope.setdefault(_ADMISSIONS, []).append(admission)


async def give_back(scope: Scope, retry_id: str) -> None:
    """The request that these admissions are for goes to another replica."""
    for i, admission in enumerate(scope.pop(_ADMISSIONS, [])):
        await admission.give_back(f"{retry_id} {i}")


def admissions_of(scope: Scope) -> list[Admission]:
    """In the order in which they were given."""
    admissions: list[Admission] = scope.get(_ADMISSIONS, [])
    return admissions
