"""Reports on their way from replicas to a router's view: lost, repeated, reordered, or to a restarted directory."""

from __future__ import annotations

import asyncio
import math
import random
from typing import ClassVar

import msgspec
import pytest

from lorafleet.cluster.directory import residency as residency_module
from lorafleet.cluster.directory.directory_calls import ReportCall
from lorafleet.cluster.directory.residency import Placed, Report, Residency, RouteView
from lorafleet.cluster.routing.routing import ReplicaChooser, ReplicaLoad, Tier
from lorafleet.cluster.serve.reporting import FULL_S, Reporter, keep_reporting, load_of, tiers_of, unread_of
from lorafleet.protocol.messages import EngineStats

LOAD = ReplicaLoad(free_slots=4)
Tiers = dict[str, Tier]


def full(replica_id: str, sequence: int, tiers: Tiers) -> Report:
    return Report(replica_id, sequence, True, dict(tiers), LOAD)


def change(replica_id: str, sequence: int, **tiers: Tier | None) -> Report:
    return Report(replica_id, sequence, False, tiers, LOAD)


class NameTable:
    """What each name stands for."""

    def __init__(self, **stands_for: tuple[str, ...]) -> None:
        self.stands_for = stands_for

    def names_of(self, adapter: str) -> list[str]:
        return [name for name, adapters in self.stands_for.items() if adapter in adapters]

    def digests_of(self, name: str) -> tuple[str, ...]:
        return self.stands_for.get(name, ())


class Router:
    def __init__(self, residency: Residency, *replicas: str) -> None:
        self.residency = residency
        self.view = RouteView(ReplicaChooser(seed=0))
        self.view.chooser.set_replicas(replicas)

    def poll(self) -> Router:
        self.residency.publish()
        self.view.apply(self.residency.since(self.view.epoch, self.view.version))
        return self

    def holds(self, replica_id: str) -> Tiers:
        tiers = self.view.chooser._tiers
        return {adapter: holders[replica_id] for adapter, holders in tiers.items() if replica_id in holders}


def test_a_change_reaches_a_router_as_a_delta() -> None:
    residency = Residency("e")
    router = Router(residency, "a", "b")
    residency.accept(full("a", 1, {"x": "gpu", "y": "cpu"}))
    assert router.poll().holds("a") == {"x": "gpu", "y": "cpu"}
    residency.accept(change("a", 2, x="cpu", y=None, z="coming"))
    assert residency.since("e", router.view.version).tiers == [], "not told yet"
    residency.publish()
    routes = residency.since("e", router.view.version)
    assert not routes.full
    assert len(routes.tiers) == 3
    assert router.poll().holds("a") == {"x": "cpu", "z": "coming"}
    assert residency.since("e", router.view.version).tiers == []


def test_what_changes_while_routers_are_told_comes_with_the_next_telling() -> None:
    residency = Residency("e")
    behind, abreast = Router(residency, "a"), Router(residency, "a")
    residency.accept(full("a", 1, {"x": "gpu"}))
    abreast.poll()
    assert not residency.changes.has_unpublished
    residency.accept(change("a", 2, x="cpu"))
    assert residency.changes.is_urgent
    residency.publish()
    residency.accept(change("a", 3, x="gpu", y="cpu"))
    told = residency.since("e", abreast.view.version)
    assert residency.since("e", abreast.view.version) is told, "for all who are as far"
    assert told.tiers == [("a", "x", "gpu")]
    assert (behind.poll().holds("a"), abreast.poll().holds("a")) == ({"x": "gpu", "y": "cpu"},) * 2
    residency.accept(Report("a", 4, False, {}, ReplicaLoad(num_running=9)))
    assert (residency.changes.has_unpublished, residency.changes.is_urgent) == (True, False), "how busy it is can wait"


def test_routers_learn_how_many_adapters_fit_into_a_replicas_memory() -> None:
    residency = Residency("e")
    for replica_id, cpu_loras in (("r1", 2), ("r2", 3)):
        tiers: dict[str, Tier | None] = {f"{replica_id} a": "cpu", f"{replica_id} b": "cpu"}
        residency.accept(Report(replica_id, 1, True, tiers, LOAD, cpu_loras=cpu_loras))
    chooser = Router(residency, "r1", "r2").poll().view.chooser
    assert {chooser.rank(f"new {number}")[0] for number in range(20)} == {"r2"}


def test_a_repeated_or_late_report_changes_nothing() -> None:
    residency = Residency("e")
    residency.accept(full("a", 1, {"x": "gpu"}))
    second = Report("a", 2, False, {"x": None, "y": "gpu"}, LOAD, {"y": 100})
    assert residency.accept(second)
    residency.publish()
    assert residency.accept(second)
    assert residency.accept(full("a", 1, {"x": "gpu"}))
    assert not residency.changes.has_unpublished
    assert residency.take_tokens() == {"y": 100}
    assert residency.take_tokens() == {}


def test_behind_a_lost_report_a_full_one_is_asked_for() -> None:
    residency = Residency("e")
    assert not residency.accept(change("a", 1, x="gpu")), "what it held before is not known"
    assert residency.accept(full("a", 2, {"x": "gpu", "y": "gpu"}))
    assert not residency.accept(change("a", 4, z="gpu"))
    assert residency.holders("z") == {}
    assert residency.accept(full("a", 5, {"z": "gpu"}))
    assert residency.holders("z") == {"a": "gpu"}
    assert residency.holders("x") == {}


@pytest.mark.parametrize("seed", range(5))
def test_after_any_losses_and_repetitions_the_next_full_report_makes_it_right(seed: int) -> None:
    rng = random.Random(seed)
    residency, reporter = Residency("e"), Reporter("a", 8)
    router = Router(residency, "a")
    held: Tiers = {}
    old: list[Report] = []
    for now in range(200):
        for adapter in rng.sample("uvwxyz", 2):
            if rng.random() < 0.4:
                held.pop(adapter, None)
            else:
                held[adapter] = rng.choice(("gpu", "coming", "cpu"))
        report = reporter.next(held, LOAD, [], {}, float(now))
        if report is not None:
            old.append(report)
            if rng.random() < 0.2:
                reporter.want_full()  # lost on its way
            elif not residency.accept(report):
                reporter.want_full()
        if rng.random() < 0.3:
            residency.accept(rng.choice(old))
        if rng.random() < 0.5:
            router.poll()
    last = reporter.next(held, LOAD, [], {}, 200.0 + FULL_S)
    assert last is not None
    assert residency.accept(last)
    assert router.poll().holds("a") == held
    assert {one: dict(residency.holders(one)) for one in held} == {one: {"a": tier} for one, tier in held.items()}


def test_a_router_that_fell_behind_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "MAX_CHANGES", 10)
    residency = Residency("e")
    router = Router(residency, "a")
    residency.accept(full("a", 1, {"x": "gpu", "gone": "cpu"}))
    router.poll()
    for i in range(10):
        residency.accept(change("a", 2 + 2 * i, y="gpu", gone=None, **{f"other{i}": "gpu"}))
        residency.accept(change("a", 3 + 2 * i, y="cpu", **{f"other{i}": None}))
        residency.publish()
    assert residency.since("e", router.view.version).full
    assert router.poll().holds("a") == {"x": "gpu", "y": "cpu"}


def test_what_changes_again_and_again_is_remembered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "MAX_CHANGES", 10)
    residency = Residency("e")
    router, abreast = Router(residency, "a"), Router(residency, "a")
    residency.accept(full("a", 1, {"x": "gpu"}))
    router.poll()
    for i in range(100):
        residency.accept(Report("a", 2 + i, False, {"y": "gpu" if i % 2 else "cpu"}, ReplicaLoad(num_running=i)))
        residency.publish()
        abreast.poll()
    routes = residency.since("e", router.view.version)
    assert (routes.full, routes.tiers) == (False, [("a", "y", "gpu")])
    assert routes.loads == {"a": ReplicaLoad(num_running=99, cpu_loras=0)}
    assert residency.since("e", abreast.view.version).loads == {}


def test_no_more_is_remembered_than_there_is_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "FEW_CHANGES", 10)
    residency = Residency("e")
    behind, abreast = Router(residency, "a"), Router(residency, "a")
    residency.accept(full("a", 1, {"x": "gpu"}))
    behind.poll()
    abreast.poll()
    for i in range(100):
        residency.accept(change("a", 2 + i, **{f"new{i}": "gpu", f"new{i - 1}": None}))
        residency.set_placed(f"new{i}", Placed(("a",), 1))
        residency.set_placed(f"new{i - 1}", Placed())
        residency.publish()
        assert not residency.since("e", abreast.view.version).full
        abreast.poll()
    assert len(residency.changes) < 20
    assert behind.poll().holds("a") == abreast.holds("a") == {"x": "gpu", "new99": "gpu"}


def test_of_much_that_is_held_as_much_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "FEW_CHANGES", 0)
    residency = Residency("e")
    router = Router(residency, "a", "b").poll()
    held: Tiers = {f"x{i}": "cpu" for i in range(50)}
    residency.accept(full("a", 1, held))
    residency.accept(full("b", 1, held))
    residency.publish()
    assert not residency.since("e", router.view.version).full
    assert (router.poll().holds("a"), router.holds("b")) == (held, held)
    residency.forget("b")
    residency.accept(full("a", 2, {}))
    residency.publish()
    assert residency._num_publishable == 1, "how busy a is"
    assert (router.poll().holds("a"), router.holds("b")) == ({}, {})


def test_what_a_restarted_directory_has_not_heard_of_goes_on_counting_for_a_router_that_falls_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency_module, "FEW_CHANGES", 0)
    residency = Residency("e")
    router = Router(residency, "a", "b")
    residency.accept(full("a", 1, {"x": "gpu"}))
    residency.accept(full("b", 1, {"y": "gpu"}))
    router.poll()
    router.residency = restarted = Residency("e2")
    router.poll()
    for i in range(10):
        restarted.accept(full("a", 2 + i, {f"x{i}": "gpu"}))
        restarted.publish()
    assert restarted.since("e2", router.view.version).full
    assert (router.poll().holds("a"), router.holds("b")) == ({"x9": "gpu"}, {"y": "gpu"})
    restarted.accept(full("b", 2, {"z": "gpu"}))
    assert router.poll().holds("b") == {"z": "gpu"}


def test_a_lost_replica_holds_nothing_and_starts_anew() -> None:
    residency = Residency("e")
    router = Router(residency, "a", "b")
    residency.accept(full("a", 7, {"x": "gpu"}))
    router.poll()
    residency.forget("a")
    assert router.poll().holds("a") == {}
    assert not residency.accept(change("a", 8, y="gpu"))
    assert residency.accept(full("a", 9, {"y": "gpu"}))
    assert router.poll().holds("a") == {"y": "gpu"}
    residency.forget("a")
    residency.accept(full("a", 1, {"z": "gpu"}))
    assert router.poll().holds("a") == {"z": "gpu"}, "gone and back between two polls"


def test_a_restarted_directory_loses_no_router_its_way_to_what_is_resident() -> None:
    first = Residency("first", NameTable(sql=("x",)))
    first.accept(full("a", 1, {"x": "gpu", "y": "cpu"}))
    first.accept(full("b", 1, {"z": "gpu"}))
    router = Router(first, "a", "b", "c").poll()
    router.residency = second = Residency("second", NameTable(sql=("x",)))
    router.poll()
    assert router.view.adapter("sql") == "x"
    assert router.view.chooser.rank("x")[0] == "a"
    assert not second.accept(change("a", 2, y=None))
    second.accept(full("a", 3, {"x": "gpu"}))
    assert router.poll().holds("a") == {"x": "gpu"}
    assert router.holds("b") == {"z": "gpu"}
    second.accept(full("b", 9, {}))
    assert router.poll().holds("b") == {}


def test_names_are_told_of_what_is_held_or_placed_and_of_nothing_else() -> None:
    table = NameTable(**{f"n{i}": (f"d{i}",) for i in range(100)})
    residency = Residency("e", table)
    router = Router(residency, "a")
    residency.accept(full("a", 1, {"d1": "gpu"}))
    residency.set_placed("d2", Placed(("a",), 5))
    residency.publish()
    assert residency.since("", -1).names == {"n1": ("d1",), "n2": ("d2",)}
    router.poll()
    assert (router.view.adapter("n1"), router.view.adapter("n3")) == ("d1", "n3")
    table.stands_for |= {"n1": ("d3", "d1"), "n2": ()}
    residency.name_changed("n1")
    residency.name_changed("n2")
    router.poll()
    assert router.view.adapter("n2") == "n2"
    assert router.view.adapter("n1") == "d1", "the version that is held somewhere"
    residency.accept(change("a", 2, d1=None))
    assert router.poll().view.adapter("n1") == "n1"


@pytest.mark.parametrize("joins_first", [False, True])
def test_a_name_that_a_restarted_directory_has_not_heard_stays_while_its_adapter_is_held(joins_first: bool) -> None:
    names = NameTable(kept=("x",), gone=("y",))
    residency = Residency("e", names)
    router = Router(residency, "a")
    residency.accept(full("a", 1, {"x": "gpu", "y": "cpu"}))
    assert (router.poll().view.adapter("kept"), router.view.adapter("gone")) == ("x", "y")
    names = NameTable()  # replicas may report before they join and bring names, and the other way round
    router.residency = restarted = Residency("f", names)
    assert router.poll().view.adapter("kept") == "x", "nobody has reported yet"
    if joins_first:
        names.stands_for = {"kept": ("x",)}
        restarted.name_changed("kept")
        assert router.poll().view.adapter("kept") == "x", "who holds it may not have said so yet"
    restarted.accept(full("a", 1, {"x": "gpu"}))
    restarted.begin("g")
    assert router.poll().view.adapter("kept") == "x"
    assert router.view.adapter("gone") == "gone", "nobody holds it any more"
    restarted.accept(change("a", 2, x=None))
    restarted.name_changed("kept")
    assert router.poll().view.adapter("kept") == "kept"


def test_homes_come_and_go() -> None:
    residency = Residency("e")
    router = Router(residency, "a", "b")
    residency.set_placed("x", Placed(("b",), 5))
    assert router.poll().view.chooser._homes == {"x": ("b",)}
    residency.set_placed("x", Placed())
    assert router.poll().view.chooser._homes == {}


def test_a_reporter_says_what_changed_and_nothing_when_nothing_did() -> None:
    reporter = Reporter("a", 8)
    first = reporter.next({"x": "gpu"}, LOAD, [], {}, 0.0)
    assert first is not None
    assert first.full
    assert reporter.next({"x": "gpu"}, LOAD, [], {}, 1.0) is None
    second = reporter.next({"y": "gpu"}, LOAD, [], {"y": 5}, 2.0)
    assert second == Report("a", 2, False, {"y": "gpu", "x": None}, LOAD, {"y": 5}, 8)
    again = reporter.next({"y": "gpu"}, LOAD, [], {}, FULL_S)
    assert again is not None
    assert again.full


def test_what_waits_for_the_disk_is_reported_when_it_changes_and_told_in_bytes() -> None:
    reporter = Reporter("a", 8)
    tiers: dict[str, Tier] = {"x": "coming", "y": "coming"}
    first = reporter.next(tiers, LOAD, ["x", "y"], {}, 0.0)
    second = reporter.next(tiers, LOAD, ["y"], {}, 1.0)
    assert first is not None and second is not None
    assert reporter.next(tiers, LOAD, ["y"], {}, 2.0) is None
    residency = Residency("e", num_bytes={"x": 30, "y": 5}.__getitem__)
    router = Router(residency, "a")
    for report, reading_bytes in ((first, 35), (second, 5)):
        residency.accept(report)
        router.poll()
        assert residency.loads["a"] == msgspec.structs.replace(LOAD, reading_bytes=reading_bytes, cpu_loras=8)


def test_the_engines_stats_become_tiers_and_a_load() -> None:
    stats = EngineStats(
        num_running=3,
        num_waiting=2,
        waiting_tokens=70,
        lora_usable=1,
        waiting_adapters=["w", "cold", "s"],
        resident_slots=["s"],
        resident_cpu=["s", "w", "c"],
    )
    assert tiers_of(stats) == {"s": "gpu", "w": "coming", "cold": "coming", "c": "cpu"}
    assert load_of(stats, 16, 500.0) == ReplicaLoad(3, 2, 70, free_slots=-1, free_places=11, kept_s=500.0)
    for since_s, kept_s in ((480.0, 20.0), (math.inf, 0.0)):
        known = msgspec.structs.replace(stats, prefixes_kept_since_s=since_s)
        assert load_of(known, 16, 500.0).kept_s == kept_s
    assert unread_of(stats) == ["cold"]


async def test_a_report_that_was_not_taken_is_repeated_in_full_though_the_engine_has_nothing_new() -> None:
    class Engine:
        stats = EngineStats(resident_slots=["x"])
        tokens_asked: ClassVar[dict[str, int]] = {}
        said = False

        async def next_stats(self) -> EngineStats:
            if self.said:
                await asyncio.Event().wait()
            self.said = True
            return self.stats

    class Restarting:
        replica_id, epoch = "a", "e"

        def __init__(self) -> None:
            self.reports: list[Report] = []
            self.accepted = asyncio.Event()

        @property
        def directory(self) -> Restarting:
            return self

        async def ask(self, call: ReportCall) -> bool:
            self.reports.append(call.report)
            if len(self.reports) == 1:
                raise ConnectionResetError
            if len(self.reports) == 3:
                self.accepted.set()
            return len(self.reports) == 3

    directory = Restarting()
    reporting = asyncio.create_task(keep_reporting(Engine(), directory, 8, 8))  # type: ignore[arg-type]  # as it uses them
    await asyncio.wait_for(directory.accepted.wait(), 60)
    reporting.cancel()
    assert [(one.full, one.tiers) for one in directory.reports] == [(True, {"x": "gpu"})] * 3
