from __future__ import annotations

import pytest

from lorafleet.cluster.directory.filling import FULL
from lorafleet.cluster.directory.prefetching import AGAIN_S, AT_ONCE, REMEMBER_S, Forecast, Prefetcher
from lorafleet.cluster.directory.residency import Report, Residency
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier

ROOM = 20


class Cluster:
    """Replicas that read at once what they are ordered to read, unless `reads` is False."""

    def __init__(self, *replicas: str) -> None:
        self.residency = Residency("e")
        self.reads = True
        self.held: dict[str, dict[str, Tier | None]] = {replica: {} for replica in replicas}
        self.ordered: list[tuple[str, str]] = []
        self.prefetcher = Prefetcher(self.residency, lambda *order: self.ordered.append(order))
        self.sequence = 0
        for replica in replicas:
            self.report(replica)

    def report(self, replica: str, *unread: str) -> None:
        self.sequence += 1
        tiers = dict(self.held[replica])
        self.residency.accept(Report(replica, self.sequence, True, tiers, ReplicaLoad(), {}, ROOM, list(unread)))

    def round(
        self,
        now: float,
        tokens: dict[str, int] | None = None,
        homes: dict[str, tuple[str, ...]] | None = None,
        leaving: tuple[str, ...] = (),
    ) -> list[tuple[str, str]]:
        before = len(self.ordered)
        for _ in self.prefetcher.steps(now, tokens or {}, homes or {}, leaving):
            pass
        for replica, digest in self.ordered[before:] if self.reads else ():
            self.held[replica][digest] = "cpu"
            self.report(replica)
        return self.ordered[before:]


def test_the_forecast_fades_and_recent_requests_weigh_most() -> None:
    forecast = Forecast(max_adapters=2)
    forecast.observe(0.0, {"old": 600, "both": 600})
    forecast.observe(REMEMBER_S, {"both": 600})
    assert forecast.of("old", REMEMBER_S) == pytest.approx(600 / REMEMBER_S / 2.71828, rel=1e-3)
    assert forecast.of("both", REMEMBER_S) == pytest.approx(forecast.of("old", REMEMBER_S) + 600 / REMEMBER_S)
    forecast.observe(REMEMBER_S, {"new": 1})
    assert forecast.of("old", REMEMBER_S) == 0.0, "the one that was requested longest ago is forgotten"


def test_a_replica_that_lost_its_memory_gets_what_was_requested_most() -> None:
    cluster = Cluster("a", "b")
    tokens = {f"x{i}": 1000 * (i + 1) for i in range(2 * ROOM)}
    for i in range(2 * ROOM):
        cluster.held["a" if i % 2 else "b"][f"x{i}"] = "cpu"
    cluster.report("a")
    cluster.report("b")
    assert cluster.round(0.0, tokens) == [], "there is no room, and everything is held"
    cluster.held["a"].clear()
    cluster.report("a")
    lost = sorted((f"x{i}" for i in range(1, 2 * ROOM, 2)), key=tokens.__getitem__, reverse=True)
    first = cluster.round(1.0)
    assert first == [("a", digest) for digest in lost[:AT_ONCE]]
    for second in range(2, 30):
        cluster.round(float(second))
    assert set(cluster.held["a"]) == set(lost[: int(FULL * ROOM)]), "some room is left, nothing is read twice"
    assert cluster.prefetcher.num_ordered == int(FULL * ROOM)


def test_an_adapter_is_read_at_its_home_and_not_where_it_must_wait() -> None:
    cluster = Cluster("a", "b")
    homes = dict.fromkeys("xyz", ("a",)) | dict.fromkeys("uvw", ("b",))
    cluster.report("b", "wanted")
    first = cluster.round(0.0, dict.fromkeys("xyz", 1000), homes)
    assert set(first + cluster.round(1.0, {}, homes) + cluster.round(2.0, {}, homes)) == {("a", name) for name in "xyz"}
    assert cluster.round(3.0, dict.fromkeys("uvw", 1000), homes, leaving=("a",)) == []
    cluster.report("b")
    assert cluster.round(4.0, {}, homes, leaving=("a",))[0][0] == "b"


def test_what_nobody_has_wanted_for_long_is_not_read() -> None:
    cluster = Cluster("a")
    cluster.report("a", "wanted")
    cluster.round(0.0, {"x": 1000, "y": 1_000_000})
    cluster.report("a")
    assert cluster.round(6 * REMEMBER_S) == [("a", "y")]


def test_a_read_that_fails_is_not_repeated_at_once() -> None:
    cluster = Cluster("a")
    cluster.reads = False
    assert cluster.round(0.0, {"x": 1000}) == [("a", "x")]
    assert cluster.round(1.0) == [] and cluster.round(AGAIN_S / 2) == []
    assert cluster.round(AGAIN_S) == [("a", "x")]
