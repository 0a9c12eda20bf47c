"""Decides where each adapter should live: a pure function of demand, bytes, ranks, residency, capacity and pins.

Only requested or pinned adapters are placed. The others live at their rendezvous homes, which any caller can compute. A
home changes only if its replica is gone or holds more than its bound. Moves that only balance are limited per round, so
that loads never come as a wave.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lorafleet.cluster.directory.replica_loads import ReplicaLoads
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of

STEP = 32  # Adapters that are only counted between two pauses.

Homes = dict[str, tuple[str, ...]]  # By adapter digest; the first home comes first.
Holders = Callable[[str], Iterable[str]]  # Returns the replicas that have an adapter in memory, best tier first.


class PlacedAdapter(NamedTuple):
    """The properties of a requested or pinned adapter that placement uses."""

    num_bytes: int
    rank: int
    demand: float = 0.0  # Prompt and answer tokens per second.
    pinned: tuple[str, ...] = ()  # Replicas that hold it in a slot.


@dataclass(frozen=True, slots=True)
class Policy:
    split: float = 0.35  # Share of a replica's fair load; an adapter has one home for each such part of its demand.
    grow: float = 1.1  # A home is added once the demand is above this multiple of what the homes are for.
    shrink: float = 0.5  # A home is removed once the demand is below this share of what added it.
    bound: float = 1.25  # Multiple of the fair share; no home is chosen where it would be exceeded.
    leave: float = 1.5  # Multiple of the fair share; homes leave a replica above it, until it is below `bound`.
    max_moves: int = 8  # Moves per round that only balance or add a further home.
    rank_cost: float = 1 / 256  # Cost per rank: a token of rank 64 takes a quarter more of a step than a base token.


DEFAULT = Policy()


class Placement:
    """One round of placement, which prefers holders of an adapter as its homes.

    Args:
        replicas: each replica's share of the work, normally 1, and less while a new one warms up.
    """

    def __init__(
        self,
        adapters: Mapping[str, PlacedAdapter],
        replicas: Mapping[str, float],
        before: Homes,
        holders: Holders,
        policy: Policy = DEFAULT,
    ) -> None:
        self.homes: Homes = {}
        self._adapters = adapters
        self._before = before
        self._holders = holders
        self._policy = policy
        self._rendezvous = Rendezvous(replicas)
        self._loads = ReplicaLoads(replicas)
        self._copies: dict[str, int] = {}
        self._to_fit: list[tuple[float, str]] = []  # A heap, hottest adapter first.
        self._moves = 0

    def steps(self) -> Iterator[None]:
        """Does the work, after which `homes` is complete. Pauses after each adapter that needs a home, and after STEP
        of those whose homes stay."""
        if not self._loads.replicas:
            return
        yield from self._sum_up()
        yield from self._keep()
        while self._to_fit:
            self._fit(heapq.heappop(self._to_fit)[1])
            yield
        yield from self._balance()

    def _sum_up(self) -> Iterator[None]:
        total = 0.0
        for step, adapter in enumerate(self._adapters.values()):
            total += self._load(adapter)
            if step % STEP == 0:
                yield
        self._loads.set_total_load(total)

    def _keep(self) -> Iterator[None]:
        """Counts the homes that stay, and queues the adapters that need other homes."""
        num_bytes = 0
        for step, (digest, adapter) in enumerate(self._adapters.items()):
            earlier = self._before.get(digest, ())
            pinned = self._present(adapter.pinned)
            homes = (*pinned, *(home for home in self._present(earlier) if home not in pinned))
            copies = self._copies[digest] = max(self._num_copies(adapter, len(earlier)), len(pinned))
            num_bytes += adapter.num_bytes * copies
            self.homes[digest] = homes
            for home in homes:
                self._count(digest, home)
            if len(homes) != copies:
                heapq.heappush(self._to_fit, (-self._load(adapter), digest))
            if step % STEP == 0:
                yield
        self._loads.set_total_bytes(num_bytes)

    def _load(self, adapter: PlacedAdapter) -> float:
        return adapter.demand * (1 + self._policy.rank_cost * adapter.rank)

    def _share(self, digest: str) -> float:
        return self._load(self._adapters[digest]) / self._copies[digest]

    def _num_copies(self, adapter: PlacedAdapter, present: int) -> int:
        fair_load = self._loads.fair_load
        parts = self._load(adapter) / (self._policy.split * fair_load) if fair_load else 0.0
        stays = (present - 1) * self._policy.shrink < parts <= present * self._policy.grow
        wanted = present if stays else math.ceil(parts)
        return min(max(1, wanted), len(self._loads.replicas))

    def _present(self, homes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(home for home in homes if home in self._loads)

    def _fit(self, digest: str) -> None:
        """Gives the adapter its number of homes. A first home is added at once, and further ones as far as moves
        allow."""
        target, pinned = self._copies[digest], self._adapters[digest].pinned
        while len(self.homes[digest]) > target:
            worst = max((home for home in self.homes[digest] if home not in pinned), key=self._excess)
            self._drop(digest, worst)
        while len(self.homes[digest]) < target:
            if self.homes[digest]:
                if self._moves >= self._policy.max_moves:
                    return
                self._moves += 1
            self._add(digest, self._choose(digest))

    def _choose(self, digest: str) -> str:
        """Returns the first replica that stays within its bound: holders first, then in rendezvous order. If there is
        none, returns the emptiest replica."""
        for replica in self._preferred(digest):
            if replica not in self.homes[digest] and self._fits(digest, replica):
                return replica
        return self._loads.emptiest(self.homes[digest])

    def _preferred(self, digest: str) -> list[str]:
        order = self._rendezvous.first(key_of(digest), 2 + 2 * self._copies[digest])
        held = [replica for replica in self._holders(digest) if replica in self._loads]
        return list(dict.fromkeys([*held, *order]))

    def _fits(self, digest: str, replica: str) -> bool:
        num_bytes = self._adapters[digest].num_bytes
        return self._loads.fits(replica, self._share(digest), num_bytes, self._policy.bound)

    def _count(self, digest: str, home: str, sign: int = 1) -> None:
        self._loads.count(home, sign * self._share(digest), sign * self._adapters[digest].num_bytes)

    def _add(self, digest: str, home: str) -> None:
        self.homes[digest] += (home,)
        self._count(digest, home)

    def _drop(self, digest: str, home: str) -> None:
        self.homes[digest] = tuple(h for h in self.homes[digest] if h != home)
        self._count(digest, home, -1)

    def _balance(self) -> Iterator[None]:
        """Moves homes from replicas above `leave` to those that stay below `bound`, the hottest that fit first."""
        above = {name: self._excess(name) for name in self._loads.replicas if self._excess(name) > 1}
        if not above or self._moves >= self._policy.max_moves:
            return
        hosted: dict[str, list[tuple[float, str]]] = {name: [] for name in above}
        for step, (digest, homes) in enumerate(self.homes.items()):
            for home in homes:
                if home in hosted and home not in self._adapters[digest].pinned:
                    heapq.heappush(hosted[home], (-self._share(digest), digest))
            if step % STEP == 0:
                yield
        for replica in sorted(above, key=lambda name: (-above[name], name)):
            while hosted[replica] and self._excess(replica) * self._policy.leave > self._policy.bound:
                if self._moves >= self._policy.max_moves:
                    return
                self._move(heapq.heappop(hosted[replica])[1], replica)
                yield

    def _move(self, digest: str, replica: str) -> None:
        """Moves the adapter away from the replica, if another one has room for it."""
        for target in [*self._preferred(digest), self._loads.emptiest(self.homes[digest])]:
            if target not in self.homes[digest] and self._fits(digest, target):
                self._drop(digest, replica)
                self._add(digest, target)
                self._moves += 1
                return

    def _excess(self, replica: str) -> float:
        """Returns a number above 1 if the replica holds so much that homes should leave it."""
        return self._loads.excess(replica, self._policy.leave)
