"""Says what memory is worth to KV blocks and to adapters, in one unit: seconds of waiting that it saves per second.

    worth = uses per second x seconds to have the content again

An adapter's uses are its recent requests. To have it again, it is copied from host memory.

A cached KV block has been idle for some time t. The pauses of conversations have a heavy tail, so a block that has been
idle for long will most likely stay idle. Its uses per second are the hazard of a Lomax distribution: r / (t +
RETURN_S), where r is the share of tokens that the prefix cache finds. To have it again, its tokens are computed, or
copied from the host tier if there is one.

Blocks depend on their adapter. They are used no more often than it is. If it is in no slot, a request waits for it in
any case, and its blocks count only for their part of that wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

RETURN_S = 30.0  # Time scale of the pauses after which KV blocks are used again.
RECENT_S = 60.0  # Time constant with which an adapter's requests fade.
LEAST_REQUESTS = 1e-3  # An adapter with fewer recent requests may be forgotten.
LEAST_REMEMBERED = 1024  # Number of adapters up to which none is forgotten.
# Something leaves only for what is worth this many times as much. Otherwise it might soon come back.
HYSTERESIS = 2.0
HOST_BYTES_PER_S = 50e9  # From pinned host memory to one H100 (benchmarks/NOTES.md).


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The use of the adapter that a KV block depends on."""

    uses_per_s: float
    missing_bytes: int = 0  # Bytes that must be copied before the adapter can be used; 0 if it is in a slot.


@dataclass(frozen=True, slots=True)
class PoolCosts:
    """The costs of one engine at one time."""

    block_s: float  # Seconds to have the content of a KV block again.
    share: float  # Share of prompt tokens that the prefix cache finds.

    def worth_of_block(self, idle_s: float, adapter: AdapterUse | None = None) -> float:
        """Returns the worth of a cached block.

        Args:
            idle_s: Time since it was used.
            adapter: None if the block is the base's.
        """
        uses_per_s = self.share / (idle_s + RETURN_S)
        if adapter is None:
            return uses_per_s * self.block_s
        part = self.block_s / (self.block_s + adapter.missing_bytes / HOST_BYTES_PER_S)
        return min(uses_per_s, adapter.uses_per_s) * self.block_s * part


def worth_of_adapter(uses_per_s: float, num_bytes: int) -> float:
    """Returns the worth of an adapter in a slot, which has this many bytes of A and B."""
    return uses_per_s * num_bytes / HOST_BYTES_PER_S


def pays(gained: float, lost: float) -> bool:
    """Returns whether memory should move, given the worth of what it will hold and of what is lost for it."""
    return lost * HYSTERESIS <= gained


@dataclass(frozen=True, slots=True)
class _Requests:
    count: float  # Of which earlier ones have faded until the time of the last.
    last_s: float
    num_bytes: int  # Bytes of the adapter, as far as they are known.


class RecentRequests:
    """Counts the requests for each adapter, of which earlier ones fade. `clock` is time.monotonic, except in tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, _Requests] = {}  # By digest.
        self._most = LEAST_REMEMBERED  # Number of adapters at which those without recent requests are forgotten.

    def count(self, digest: str, num_bytes: int | None = None) -> None:
        """Counts one more request. `num_bytes` is the size of the adapter's A and B; None if it is not known now."""
        now_s, known = self._clock(), self._requests.get(digest)
        if num_bytes is None:
            num_bytes = 0 if known is None else known.num_bytes
        self._requests[digest] = _Requests(self._faded(digest, now_s) + 1.0, now_s, num_bytes)
        if len(self._requests) > self._most:
            recent = [other for other in self._requests if self._faded(other, now_s) > LEAST_REQUESTS]
            self._requests = {other: self._requests[other] for other in recent}
            self._most = max(LEAST_REMEMBERED, 2 * len(recent))

    def per_s(self, digest: str) -> float:
        """Returns the adapter's requests per second."""
        return self._faded(digest, self._clock()) / RECENT_S

    def use_of(self, digest: str, *, is_here: bool) -> AdapterUse:
        """Returns the use of an adapter. `is_here` says that it is in a slot."""
        known = self._requests.get(digest)
        return AdapterUse(self.per_s(digest), 0 if is_here or known is None else known.num_bytes)

    def _faded(self, digest: str, now_s: float) -> float:
        known = self._requests.get(digest)
        return 0.0 if known is None else known.count * math.exp((known.last_s - now_s) / RECENT_S)
