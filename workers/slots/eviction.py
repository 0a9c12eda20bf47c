"""Which adapter of a full tier is worth least: by how often it is asked for, what it costs to bring back, and how long
ago it was used.

GreedyDual-Size with Frequency (Cherkasova, HPL-98-69): on each use an adapter's credit becomes the present floor plus
demand x cost; the least credit goes, and becomes the floor. So what is used no more is overtaken by what is, however
much it was once asked for. The cost is the adapter's size, as reading, packing and copying all go by bytes; tiers
count adapters, so all take the same room. Unlike in the paper, demand outlives eviction (a cold name that comes once
cannot pass for a hot one), and fades.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HALF_LIFE = 32  # times the adapters in host memory: after so many requests an earlier one counts half
REMEMBERED = 64  # times the adapters in host memory: so many have a demand at all
MAX_WEIGHT = 1e100
RECENT_S = 60.0  # A tenant that has wanted no adapter for so long has no share of a tier (fair_shares.py).


class Demand:
    """Requests for each adapter, those of late counting most, and which tenants have wanted any of late. capacity:
    adapters in host memory."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wanted_s: dict[str, float] = {}  # By tenant: all there ever were, which the operator's key file bounds.
        self._growth = 2 ** (1 / (HALF_LIFE * capacity))
        self._max_known = REMEMBERED * capacity
        self._weight = 1.0  # of a request now; growing it is fading all others
        self._sums: dict[str, float] = {}

    def count(self, digest: str) -> None:
        """A request asks for it."""
        self._weight *= self._growth
        if self._weight > MAX_WEIGHT:
            self._sums = {one: total / self._weight for one, total in self._sums.items()}
            self._weight = 1.0
        self._sums[digest] = self._sums.get(digest, 0.0) + self._weight
        if len(self._sums) > self._max_known:
            most_first = sorted(self._sums, key=self._sums.__getitem__, reverse=True)
            self._sums = {one: self._sums[one] for one in most_first[: self._max_known // 2]}

    def want(self, tenant: str) -> None:
        """The tenant wants an adapter: a new one, or to be answered by it."""
        self._wanted_s[tenant] = self._clock()

    def is_recent(self, tenant: str) -> bool:
        wanted_s = self._wanted_s.get(tenant)
        return wanted_s is not None and self._clock() - wanted_s < RECENT_S

    def of(self, digest: str) -> float:
        return self._sums.get(digest, 0.0) / self._weight


class Credits:
    """Of the adapters in one tier. Among equals the least recently used has the least."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._credit: dict[str, tuple[float, int]] = {}  # and the number of the use
        self._num_uses = 0
        self._floor = 0.0

    def use(self, digest: str, num_bytes: int) -> None:
        """What nobody has asked for yet counts as asked for once: a push, or a prefetch, expects it."""
        self._num_uses += 1
        self._credit[digest] = self._floor + max(1.0, self._demand.of(digest)) * num_bytes, self._num_uses

    def of(self, digest: str) -> tuple[float, int]:
        return self._credit[digest]

    def evict(self, digest: str) -> None:
        """For want of room."""
        self._floor = max(self._floor, self._credit.pop(digest)[0])

    def forget(self, digest: str) -> None:
        self._credit.pop(digest, None)
