# ruff: noqa: ARG002  # An arm need not use everything that it is given.
"""Implements the routing rules that benchmarks/placement.py compares.

All rules see the same reports with the same delay, except the clairvoyant, which sees the replicas themselves and the
requests to come.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from lorafleet.cluster.directory import residency
from lorafleet.cluster.directory.filling import Filler
from lorafleet.cluster.directory.placer import Placer
from lorafleet.cluster.directory.prefetching import Prefetcher
from lorafleet.cluster.directory.residency import Residency, RouteView
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier
from lorafleet.cluster.routing.rule_names import RoutingRule
from lorafleet.cluster.routing.simple_rules import make_chooser
from simulated_replica import FILL_BYTES_S, Replica, Request

Report = tuple[str, ReplicaLoad, list[int], list[tuple[int, Tier | None]]]


class Arm(Protocol):
    """A routing rule, whose `choose` returns the name of a replica, and `observe` receives the replicas' reports."""

    def choose(self, request: Request, now: float) -> str: ...
    def observe(self, reports: Sequence[Report], now: float) -> None: ...
    def each_second(self, now: float) -> None: ...


class _Blind:
    def __init__(self, replicas: Sequence[Replica], seed: int) -> None:
        self.replicas = replicas
        self.names = [replica.name for replica in replicas]
        self.random = random.Random(seed)

    def observe(self, reports: Sequence[Report], now: float) -> None:
        pass

    def each_second(self, now: float) -> None:
        pass


class Random(_Blind):
    def choose(self, request: Request, now: float) -> str:
        return self.random.choice(self.names)


class RendezvousOnly(_Blind):
    def __init__(self, replicas: Sequence[Replica], seed: int) -> None:
        super().__init__(replicas, seed)
        self.rendezvous = Rendezvous(dict.fromkeys(self.names, 1.0))

    def choose(self, request: Request, now: float) -> str:
        return self.rendezvous.replicas[self.rendezvous.home(key_of(str(request.adapter)))]


class Product(_Blind):
    """Runs the product's own code, by one of its rules: reports go through Residency and Placer to a router's view."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        seed: int,
        sizes: Sequence[int],
        ranks: Sequence[int],
        rule: RoutingRule,
        *,
        fill: bool,
        prefetch: bool,
    ) -> None:
        super().__init__(replicas, seed)
        self.by_name = {replica.name: replica for replica in replicas}
        self.now = 0.0
        # The order is not by popularity, unlike the adapters' numbers.
        by_hash = sorted(map(str, range(len(sizes))), key=key_of)
        self.residency = Residency("simulated", None, lambda adapter: sizes[int(adapter)])
        self.placer = Placer(
            self.residency,
            lambda adapter: (sizes[int(adapter)], ranks[int(adapter)]),
            dict,
            self.prefetch,
            Filler(self.residency, lambda: by_hash, self.prefetch) if fill else None,
            prefetcher=Prefetcher(self.residency, self.prefetch) if prefetch else None,
            places_by_demand=rule == "affinity",
        )
        self.view = RouteView(make_chooser(rule, seed))
        self.view.chooser.set_replicas(self.names)
        self.sequence = Counter[str]()
        self.tokens: dict[str, Counter[str]] = {name: Counter() for name in self.names}
        self.cpu_loras = {replica.name: replica.cpu_adapters for replica in replicas}

    def prefetch(self, replica: str, adapter: str) -> None:
        self.by_name[replica].read_ahead(int(adapter), self.now)

    def choose(self, request: Request, now: float) -> str:
        adapter, arrival = str(request.adapter), request.arrival
        chosen = self.view.chooser.rank(adapter)[0]
        self.view.chooser.sent(adapter, chosen, arrival.num_input)
        self.tokens[chosen][adapter] += arrival.num_input + arrival.num_output
        return chosen

    def observe(self, reports: Sequence[Report], now: float) -> None:
        for name, load, unread, changes in reports:
            self.sequence[name] += 1
            tiers = {str(adapter): tier for adapter, tier in changes}
            first = self.sequence[name] == 1
            tokens, waiting = dict(self.tokens[name]), [str(adapter) for adapter in unread]
            report = residency.Report(
                name, self.sequence[name], first, tiers, load, tokens, self.cpu_loras[name], waiting
            )
            self.tokens[name].clear()
            assert self.residency.accept(report)
        self._tell_router()

    def each_second(self, now: float) -> None:
        self.now = now
        for _ in self.placer.round(now):
            pass
        self._tell_router()

    def _tell_router(self) -> None:
        self.residency.publish()
        self.view.apply(self.residency.since(self.view.epoch, self.view.version))


class Clairvoyant(_Blind):
    """Sees queues, slots and disks as they are. Its replicas know the arrivals and evict by Belady's rule."""

    def __init__(self, replicas: Sequence[Replica], seed: int, sizes: Sequence[int]) -> None:
        super().__init__(replicas, seed)
        self.sizes = sizes

    def choose(self, request: Request, now: float) -> str:
        return min(self.replicas, key=lambda replica: self.first_token_s(replica, request, now)).name

    # The cost of displacing an adapter for the requests that need it; without this term the p99 is worse.
    MOVE_S = 0.05

    def first_token_s(self, replica: Replica, request: Request, now: float) -> float:
        adapter = request.adapter
        wait = replica.batch_wait_s() + 0.5e-3 * (replica.num_running + replica.num_waiting)
        tier = replica.tier(adapter)
        if tier == "gpu":
            return wait
        coming = tier == "coming"
        wait += self.sizes[adapter] / FILL_BYTES_S
        if not coming:
            wait += replica.slot_wait_s(now) + self.MOVE_S
        if tier is None:
            wait += replica.disk_wait_s(now) + 2 * replica.read_s(adapter)
        return wait


RULES: dict[str, RoutingRule] = {
    "round-robin": "round-robin",
    "power of two": "power-of-two",
    "Ray multiplex sticky": "sticky",
    "ours": "affinity",
    "ours, filled": "affinity",
    "ours, not prefetched": "affinity",
}


def make(name: str, replicas: Sequence[Replica], seed: int, sizes: Sequence[int], ranks: Sequence[int]) -> Arm:
    match name:
        case "random":
            return Random(replicas, seed)
        case "rendezvous only":
            return RendezvousOnly(replicas, seed)
        case "clairvoyant":
            return Clairvoyant(replicas, seed, sizes)
    rule = RULES[name]
    prefetch = rule == "affinity" and name != "ours, not prefetched"
    return Product(replicas, seed, sizes, ranks, rule, fill=name == "ours, filled", prefetch=prefetch)


ARMS = ("random", "rendezvous only", "clairvoyant", *RULES)
