"""Where each adapter should live: a pure function of demand, bytes, ranks, residency, capacity, pins and wishes.

Only adapters that somebody asks for, pins or wishes for are placed; the cold rest lives at its rendezvous home, which
whoever needs it computes on the spot. A home is kept unless there is cause to leave it: its replica is gone, or holds
more than its bound. Moves that only balance are few a round, so that loads never come as a wave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lorafleet.cluster.rendezvous import Rendezvous, key_of

Homes = dict[str, tuple[str, ...]]  # by adapter digest, the first home first


@dataclass(frozen=True, slots=True)
class Adapter:
    """What placement knows of one that is asked for, pinned or wished for."""

    num_bytes: int
    rank: int
    demand: float = 0.0  # prompt and answer tokens a second
    copies: int = 0  # pinned or wished for on so many replicas


@dataclass(frozen=True, slots=True)
class Policy:
    split: float = 1.0  # of a replica's fair share of the load: an adapter has a home for each such part of its demand
    shrink: float = 0.5  # a home is given up once the demand is below this share of what brought it
    bound: float = 1.25  # of the fair share: no home is chosen where that would be exceeded
    leave: float = 1.5  # of the fair share: homes leave a replica above it, until it is below `bound`
    max_moves: int = 8  # a round, of those that only balance
    rank_cost: float = 1 / 256  # a token of a rank-64 adapter takes a quarter more of a step than one of the base


DEFAULT = Policy()


def place(
    adapters: Mapping[str, Adapter],
    replicas: Mapping[str, float],
    before: Homes,
    holders: Mapping[str, Iterable[str]],
    policy: Policy = DEFAULT,
) -> Homes:
    """replicas: each one's share of the work, 1 in general and less while a new one warms up. holders: who has an
    adapter in memory now, best tier first; a home is rather chosen among them."""
    if not replicas:
        return {}
    return _Placement(adapters, replicas, before, holders, policy).run()


class _Placement:
    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        replicas: Mapping[str, float],
        before: Homes,
        holders: Mapping[str, Iterable[str]],
        policy: Policy,
    ) -> None:
        self._adapters = adapters
        self._replicas = replicas
        self._holders = holders
        self._policy = policy
        self._rendezvous = Rendezvous(replicas)
        self._order: dict[str, list[str]] = {}
        weight = sum(replicas.values())
        self._loads = {one: a.demand * (1 + policy.rank_cost * a.rank) for one, a in adapters.items()}
        self._fair_load = sum(self._loads.values()) / weight
        self._homes = {one: tuple(home for home in before.get(one, ()) if home in replicas) for one in adapters}
        self._copies = {one: self._num_copies(one, len(before.get(one, ()))) for one in adapters}
        self._fair_bytes = sum(a.num_bytes * self._copies[one] for one, a in adapters.items()) / weight
        self._load = dict.fromkeys(replicas, 0.0)
        self._bytes = dict.fromkeys(replicas, 0)
        self._moves = 0

    def run(self) -> Homes:
        for one, homes in self._homes.items():
            for home in homes:
                self._count(one, home)
        hottest_first = sorted(self._adapters, key=lambda one: (-self._loads[one], one))
        for one in hottest_first:
            self._fit(one)
        self._balance()
        return {one: homes for one, homes in self._homes.items() if homes}

    def _share(self, one: str) -> float:
        return self._loads[one] / max(1, self._copies[one])

    def _num_copies(self, one: str, present: int) -> int:
        adapter = self._adapters[one]
        parts = self._loads[one] / (self._policy.split * self._fair_load) if self._fair_load else 0.0
        wanted = max(1, math.ceil(parts))
        if wanted < present and parts > (present - 1) * self._policy.shrink:
            wanted = present
        return min(max(wanted, adapter.copies), len(self._replicas))

    def _fit(self, one: str) -> None:
        """As many homes as it should have. A lost or first one at once, more of them as moves allow."""
        target = self._copies[one]
        while len(self._homes[one]) > target:
            worst = max(self._homes[one], key=lambda home: self._relative(home))
            self._drop(one, worst)
        required = max(1, min(self._adapters[one].copies, target))
        while len(self._homes[one]) < target:
            if len(self._homes[one]) >= required:
                if self._moves >= self._policy.max_moves:
                    return
                self._moves += 1
            home = self._choose(one)
            self._homes[one] += (home,)
            self._count(one, home)

    def _choose(self, one: str) -> str:
        """The first that stays within its bound, of the holders and then in rendezvous order; else the least loaded."""
        free = [r for r in self._preferred(one) if r not in self._homes[one]]
        for replica in free:
            if self._fits(one, replica):
                return replica
        return min((r for r in self._replicas if r not in self._homes[one]), key=lambda r: (self._relative(r), r))

    def _preferred(self, one: str) -> list[str]:
        order = self._order.get(one)
        if order is None:
            order = self._rendezvous.first(key_of(one), 2 + 2 * self._copies[one])
            self._order[one] = order
        held = [r for r in self._holders.get(one, ()) if r in self._replicas]
        return list(dict.fromkeys([*held, *order]))

    def _fits(self, one: str, replica: str) -> bool:
        num_bytes = self._adapters[one].num_bytes
        bound = self._policy.bound * self._replicas[replica]
        load_after = self._load[replica] + self._share(one)
        bytes_after = self._bytes[replica] + num_bytes
        return (load_after <= max(bound * self._fair_load, self._share(one))) and (
            bytes_after <= max(bound * self._fair_bytes, num_bytes)
        )

    def _relative(self, replica: str) -> float:
        return self._load[replica] / self._replicas[replica]

    def _count(self, one: str, home: str, sign: int = 1) -> None:
        self._load[home] += sign * self._share(one)
        self._bytes[home] += sign * self._adapters[one].num_bytes

    def _drop(self, one: str, home: str) -> None:
        self._homes[one] = tuple(h for h in self._homes[one] if h != home)
        self._count(one, home, -1)

    def _balance(self) -> None:
        """Replicas above `leave` give homes to those that stay below `bound`, the hottest that fit first."""
        above = [r for r in self._replicas if self._excess(r) > 1]
        if not above:
            return
        hosted: dict[str, list[str]] = {r: [] for r in above}
        for one, homes in self._homes.items():
            for home in homes:
                if home in hosted:
                    hosted[home].append(one)
        for replica in sorted(above, key=lambda r: (-self._excess(r), r)):
            for one in sorted(hosted[replica], key=lambda a: (-self._share(a), a)):
                if self._moves >= self._policy.max_moves or not self._overfull(replica):
                    break
                to = next((r for r in self._preferred(one) if r not in self._homes[one] and self._fits(one, r)), None)
                if to is None:
                    least = min(self._replicas, key=lambda r: (self._relative(r), r))
                    to = least if least not in self._homes[one] and self._fits(one, least) else None
                if to is not None:
                    self._drop(one, replica)
                    self._homes[one] += (to,)
                    self._count(one, to)
                    self._moves += 1

    def _excess(self, replica: str) -> float:
        """Above 1 where it holds so much that homes should leave."""
        limit = self._policy.leave * self._replicas[replica]
        of_load = self._load[replica] / (limit * self._fair_load) if self._fair_load else 0.0
        of_bytes = self._bytes[replica] / (limit * self._fair_bytes) if self._fair_bytes else 0.0
        return max(of_load, of_bytes)

    def _overfull(self, replica: str) -> bool:
        return self._excess(replica) * self._policy.leave > self._policy.bound
