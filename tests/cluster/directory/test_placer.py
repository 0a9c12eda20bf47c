from __future__ import annotations

from lorafleet.cluster.directory.placer import MEMORY_S, Placer
from lorafleet.cluster.directory.residency import Report, Residency
from lorafleet.cluster.routing.routing import ReplicaLoad

SIZE = 84_000_000


class Cluster:
    def __init__(self, *replicas: str) -> None:
        self.residency = Residency("e")
        self.reads: list[tuple[str, str]] = []
        self.pinned: dict[str, tuple[str, ...]] = {}
        self.placer = Placer(
            self.residency, lambda _: (SIZE, 16), lambda: self.pinned, lambda *read: self.reads.append(read), None
        )
        self.sequence = 0
        for one in replicas:
            self.report(one, {})

    def report(self, replica: str, tokens: dict[str, int]) -> None:
        self.sequence += 1
        self.residency.accept(Report(replica, self.sequence, True, {}, ReplicaLoad(), tokens, 32))

    def round(self, now: float) -> dict[str, tuple[str, ...]]:
        for _ in self.placer.round(now):
            pass
        return {one: placed.homes for one, placed in self.residency.since("", -1).placed.items()}


def test_what_is_asked_for_is_placed_until_it_is_forgotten() -> None:
    cluster = Cluster("a", "b")
    cluster.report("a", {"sql": 10_000})
    homes = cluster.round(0.0)
    assert homes.keys() == {"sql"}
    assert cluster.round(1.0) == homes
    assert cluster.placer.counts.placed == 1
    assert cluster.round(20 * MEMORY_S) == {}
    assert cluster.placer.counts.placed == 0


def test_replicas_that_start_one_after_another_share_the_first_adapters_evenly() -> None:
    cluster = Cluster("a")
    cluster.round(0.0)
    cluster.report("b", {})
    cluster.round(10.0)
    cluster.report("a", {f"x{i}": 1000 for i in range(16)})
    homes = [home for homes in cluster.round(11.0).values() for home in homes]
    assert 6 <= homes.count("b") <= 10


def test_a_replica_that_joins_others_with_adapters_gets_its_share_gradually() -> None:
    cluster = Cluster("a")
    cluster.report("a", {f"x{i}": 1000 for i in range(16)})
    cluster.round(0.0)
    cluster.report("b", {})
    cluster.report("a", {f"x{i}": 1000 for i in range(16)})
    assert sum("b" in homes for homes in cluster.round(1.0).values()) <= 2


def test_a_pinned_adapter_is_placed_where_it_is_pinned() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.pinned = {"sql": ("c", "a")}
    assert cluster.round(0.0) == {"sql": ("c", "a")}
    cluster.pinned = {}
    assert cluster.round(1.0) == {}


def test_homes_that_move_are_counted_with_their_bytes() -> None:
    cluster = Cluster("a", "b")
    cluster.report("a", {f"x{i}": 1000 for i in range(8)})
    before = cluster.round(0.0)
    assert (cluster.placer.counts.moves, cluster.placer.counts.moved_bytes) == (0, 0), "first homes are no moves"
    assert (cluster.placer.counts.placements, cluster.placer.counts.rebalances) == (8, 0)
    lost = [one for one, homes in before.items() if "b" in homes]
    cluster.residency.forget("b")
    cluster.round(1.0)
    assert lost
    assert cluster.placer.counts.moves == len(lost)
    assert cluster.placer.counts.moved_bytes == len(lost) * SIZE
    assert (cluster.placer.counts.placements, cluster.placer.counts.rebalances) == (8, 1)
    cluster.round(2.0)
    assert cluster.placer.counts.rebalances == 1, "nothing has moved"


def test_a_replica_that_leaves_during_a_round_is_out_of_the_next() -> None:
    cluster = Cluster("a", "b")
    cluster.report("a", {"hot": 100_000, "x": 100})
    halves = cluster.placer.round(0.0)
    next(halves)
    cluster.residency.forget("b")
    for _ in halves:
        pass
    assert all(homes == ("a",) for homes in cluster.round(1.0).values())


def test_second_homes_are_read_ahead() -> None:
    cluster = Cluster("a", "b")
    cluster.report("a", {"hot": 100_000, "x": 100})
    homes = cluster.round(0.0)
    assert set(homes["hot"]) == {"a", "b"}
    assert set(cluster.reads) == {("a", "hot"), ("b", "hot")}
    assert cluster.placer.counts.reads_ahead == 2
