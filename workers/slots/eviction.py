"""Decides which adapter of a full tier is worth least, by request frequency, reload cost and time since the last use.

The algorithm is GreedyDual-Size with Frequency (Cherkasova, HPL-98-69). On each use, an adapter's credit becomes the
current floor plus demand x cost. The adapter with the least credit is evicted, and its credit becomes the floor. So
adapters in use overtake adapters that are no longer used, however often those were once requested. The cost of an
adapter is the time to load it for the room that it takes. Reading, packing and copying all take time in proportion to
its bytes. Host memory counts adapters, so there the cost is the size. Slots count bytes, so there it is the same for
all.

Unlike in the paper, demand outlives eviction, so that a cold adapter that is requested once cannot pass for a hot one.
Demand decays with time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HALF_LIFE = 32  # times the number of adapters in host memory: after that many requests, an earlier one counts half
REMEMBERED = 64  # times the number of adapters in host memory: demand is recorded for up to that many adapters
MAX_WEIGHT = 1e100
RECENT_S = 60.0  # A tenant that has wanted no adapter for this long has no share of a tier (fair_shares.py).


class Demand:
    """Counts the requests for each adapter, where recent ones count most, and records which tenants have recently
    wanted any.

    `capacity` is the number of adapters in host memory.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By tenant; never pruned, since the operator's key file bounds the tenants.
        self._wanted_s: dict[str, float] = {}
        self._growth = 2 ** (1 / (HALF_LIFE * capacity))
        self._max_known = REMEMBERED * capacity
        self._weight = 1.0  # weight of a request now; increasing it decays all earlier requests
        self._sums: dict[str, float] = {}

    def count(self, digest: str) -> None:
        """Counts one request for the adapter."""
        self._weight *= self._growth
        if self._weight > MAX_WEIGHT:
            self._sums = {known: total / self._weight for known, total in self._sums.items()}
            self._weight = 1.0
        self._sums[digest] = self._sums.get(digest, 0.0) + self._weight
        if len(self._sums) > self._max_known:
            most_first = sorted(self._sums, key=self._sums.__getitem__, reverse=True)
            self._sums = {known: self._sums[known] for known in most_first[: self._max_known // 2]}

    def want(self, tenant: str) -> None:
        """Records that the tenant wants to load an adapter, or to be answered by one."""
        self._wanted_s[tenant] = self._clock()

    def is_recent(self, tenant: str) -> bool:
        wanted_s = self._wanted_s.get(tenant)
        return wanted_s is not None and self._clock() - wanted_s < RECENT_S

    def of(self, digest: str) -> float:
        return self._sums.get(digest, 0.0) / self._weight


class Credits:
    """The credits of the adapters in one tier. Among equals, the least recently used adapter has the least credit."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._credit: dict[str, tuple[float, int]] = {}  # credit and number of the last use
        self._num_uses = 0
        self._floor = 0.0

    def use(self, digest: str, cost: int) -> None:
        """Updates the credit of an adapter that is used.

        An adapter that nobody has requested yet counts as requested once, since a push or a prefetch expects a
        request.
        """
        self._num_uses += 1
        self._credit[digest] = self._floor + max(1.0, self._demand.of(digest)) * cost, self._num_uses

    def of(self, digest: str) -> tuple[float, int]:
        return self._credit[digest]

    def evict(self, digest: str) -> None:
        """Removes an adapter that is evicted for lack of room, and raises the floor to its credit."""
        self._floor = max(self._floor, self._credit.pop(digest)[0])

    def forget(self, digest: str) -> None:
        self._credit.pop(digest, None)
