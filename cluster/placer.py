"""The directory's placement round: measures demand from the replicas' reports and says where adapters should live.

Its outcome goes two ways: homes to the routers through Residency, and to replicas the adapters that they should read
before they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lorafleet.cluster.placement import Adapter, Homes, place
from lorafleet.cluster.residency import Placed, Residency
from lorafleet.cluster.routing import TYPICAL_BYTES, Tier

ROUND_S = 1.0
MEMORY_S = 6.0  # demand is the mean of about so many seconds
FORGET_TOKENS_S = 0.5  # an adapter asked for less than this is left to its rendezvous home
WARM_UP_S = 30.0  # until a new replica has its full share
NEW_WEIGHT = 0.1
READ_AHEAD = 4  # adapters that one replica is told to read in a round
ROOM = 0.8  # of a replica's host memory is filled ahead

Sizes = Callable[[str], tuple[int, int] | None]  # of an adapter: bytes and rank, where the catalogue knows it


class Placer:
    """prefetch(replica, adapter): the replica should read it, soon."""

    def __init__(self, residency: Residency, sizes: Sizes, prefetch: Callable[[str, str], None]) -> None:
        self.demand: dict[str, float] = {}  # tokens a second
        self.wishes: dict[str, int] = {}  # adapter -> on so many replicas at least
        self.homes: Homes = {}
        self.num_moves = 0
        self._residency = residency
        self._sizes = sizes
        self._prefetch = prefetch
        self._known_since: dict[str, float] = {}
        self._last_s: float | None = None

    def round(self, now: float) -> None:
        """Called about every ROUND_S."""
        self._measure(now)
        residency = self._residency
        replicas = self._weights(now)
        active = self.demand.keys() | self.wishes.keys()
        adapters = {one: self._adapter(one) for one in active}
        holders = {one: _nearest_first(residency.holders(one)) for one in active}
        before, self.homes = self.homes, place(adapters, replicas, self.homes, holders)
        for one in before.keys() - self.homes.keys():
            residency.set_placed(one, Placed())
        for one, homes in self.homes.items():
            if before.get(one) != homes:
                self.num_moves += one in before
                residency.set_placed(one, Placed(homes, adapters[one].num_bytes))
        self._read_ahead(adapters)

    def _measure(self, now: float) -> None:
        elapsed = now - self._last_s if self._last_s is not None else ROUND_S
        self._last_s = now
        keep = max(0.0, 1 - elapsed / MEMORY_S)
        demand = {one: rate * keep for one, rate in self.demand.items()}
        for one, tokens in self._residency.tokens.items():
            demand[one] = demand.get(one, 0.0) + tokens / MEMORY_S
        self._residency.tokens.clear()
        self.demand = {one: rate for one, rate in demand.items() if rate > FORGET_TOKENS_S}

    def _weights(self, now: float) -> dict[str, float]:
        """The first replicas are all alike; one that joins others starts small, and gets adapters a few at a time."""
        present = self._residency.loads
        first = not self._known_since
        known = {one: self._known_since.get(one, now - WARM_UP_S * first) for one in present}
        self._known_since = known
        return {one: min(1.0, max(NEW_WEIGHT, (now - since) / WARM_UP_S)) for one, since in known.items()}

    def _adapter(self, one: str) -> Adapter:
        num_bytes, rank = self._sizes(one) or (TYPICAL_BYTES, 16)
        return Adapter(num_bytes, rank, self.demand.get(one, 0.0), self.wishes.get(one, 0))

    def _read_ahead(self, adapters: Mapping[str, Adapter]) -> None:
        """Homes that do not have their adapter yet: those wished for, and second homes, as the first one is read by
        the request that makes it one. The most asked for in proportion to its bytes first."""
        room = {one: ROOM * cpu_loras for one, cpu_loras in self._residency.cpu_loras.items()}
        told = dict.fromkeys(room, 0)
        order = sorted(self.homes, key=lambda one: (-adapters[one].copies, -_density(adapters[one]), one))
        for one in order:
            homes = self.homes[one]
            holders = self._residency.holders(one)
            for home in homes:
                room[home] -= 1
                ahead = len(homes) > 1 or adapters[one].copies > 0
                if ahead and home not in holders and room[home] >= 0 and told[home] < READ_AHEAD:
                    told[home] += 1
                    self._prefetch(home, one)


def _density(adapter: Adapter) -> float:
    return adapter.demand / max(1, adapter.num_bytes)


def _nearest_first(holders: Mapping[str, Tier]) -> list[str]:
    return sorted(holders, key=lambda one: ("gpu", "coming", "cpu").index(holders[one]))
