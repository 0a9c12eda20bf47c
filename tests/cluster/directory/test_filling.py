from __future__ import annotations

from lorafleet.cluster.directory.filling import AT_ONCE, FULL, SCAN, Filler
from lorafleet.cluster.directory.residency import Report, Residency
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier

ROOM = 20


class Cluster:
    """Replicas that read at once what they are told to."""

    def __init__(self, num_adapters: int, *replicas: str) -> None:
        self.residency = Residency("e")
        self.adapters = [f"x{i}" for i in range(num_adapters)]
        self.held: dict[str, dict[str, Tier | None]] = {one: {} for one in replicas}
        self.told: list[tuple[str, str]] = []
        self.filler = Filler(self.residency, lambda: self.adapters, lambda *read: self.told.append(read))
        self.sequence = 0
        for one in replicas:
            self.report(one)

    def report(self, replica: str, *unread: str) -> None:
        self.sequence += 1
        tiers = dict(self.held[replica])
        self.residency.accept(Report(replica, self.sequence, True, tiers, ReplicaLoad(), {}, ROOM, list(unread)))

    def round(self, leaving: tuple[str, ...] = ()) -> list[tuple[str, str]]:
        """What replicas were told to read, and now hold."""
        before = len(self.told)
        for _ in self.filler.steps(leaving):
            pass
        for replica, adapter in self.told[before:]:
            self.held[replica][adapter] = "cpu"
            self.report(replica)
        return self.told[before:]


def test_empty_host_memory_is_filled_a_few_adapters_a_round_each_at_one_replica() -> None:
    cluster = Cluster(24, "a", "b")
    for number in range(10):
        told = cluster.round()
        assert all(sum(1 for one, _ in told if one == replica) <= AT_ONCE for replica in "ab"), number
    assert sorted(adapter for _, adapter in cluster.told) == sorted(cluster.adapters)
    assert cluster.filler.num_ordered == 24


def test_some_room_is_left_and_nothing_is_pushed_out() -> None:
    cluster = Cluster(100, "a", "b")
    for _ in range(20):
        cluster.round()
    assert {replica: len(held) for replica, held in cluster.held.items()} == dict.fromkeys("ab", int(FULL * ROOM))


def test_a_replica_whose_disk_is_waited_for_or_that_leaves_takes_nothing() -> None:
    cluster = Cluster(10, "a", "b")
    cluster.report("a", "wanted")
    cluster.round()
    assert {replica for replica, _ in cluster.round()} == {"b"}
    assert cluster.round(leaving=("b",)) == []


def test_an_adapter_that_cannot_be_read_is_tried_again_only_when_that_replica_is_gone() -> None:
    cluster = Cluster(1, "a", "b")
    for _ in range(5):
        for _ in cluster.filler.steps(()):
            pass
    [(replica, _)] = cluster.told
    cluster.residency.forget(replica)
    for _ in range(3):
        cluster.round()
    assert [one for one, _ in cluster.told] == [replica, "b" if replica == "a" else "a"]


def test_nothing_is_kept_of_adapters_that_are_gone() -> None:
    cluster = Cluster(10, "a", "b")
    for _ in range(10):
        cluster.round()
    cluster.adapters = ["x0", "x0"]  # by two names
    for one in cluster.held:
        cluster.held[one] = {}
        cluster.report(one)
    before = len(cluster.told)
    for _ in range(6):
        cluster.round()
    assert len(cluster.told) == before, "where it was told before it is not told again"
    cluster.adapters = [f"x{number}" for number in range(10)]
    for _ in range(6):
        cluster.round()
    assert sorted(adapter for _, adapter in cluster.told[before:]) == cluster.adapters[1:], "those that are back"


def test_a_round_looks_at_a_bounded_number_of_adapters() -> None:
    cluster = Cluster(5 * SCAN, "a")
    cluster.held["a"] = dict.fromkeys([f"x{i}" for i in range(5)], "cpu")
    cluster.report("a")
    seen: list[str] = []
    holders = cluster.residency.holders
    cluster.residency.holders = lambda one: (seen.append(one), holders("x0"))[1]  # type: ignore[method-assign]  # all are held
    cluster.round()
    cluster.round()
    assert len(seen) == SCAN
