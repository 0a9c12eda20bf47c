"""The publication of residency to routers: moves at once, loads together, all that changed by then in one answer."""

from __future__ import annotations

import asyncio

from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.replica_table import ReplicaTable
from lorafleet.cluster.directory.residency import Report, Residency
from lorafleet.cluster.directory.route_broadcast import RouteBroadcast
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier

TIMING = DirectoryTiming(hold_s=0.02, moves_s=1.0, loads_s=5.0)


class Routers:
    def __init__(self) -> None:
        self.now_s = 0.0
        replicas = ReplicaTable(TIMING, self.clock, lambda: None, lambda _: None)
        replicas.join("r1", is_ready=True)
        self.broadcast = RouteBroadcast(Residency("e"), replicas, TIMING, self.clock)
        self.sequence = 0

    def clock(self) -> float:
        return self.now_s

    def report(self, num_running: int, **tiers: Tier | None) -> None:
        self.sequence += 1
        report = Report("r1", self.sequence, self.sequence == 1, tiers, ReplicaLoad(num_running=num_running))
        assert self.broadcast.accept(report)


async def test_a_replica_that_has_not_joined_cannot_report() -> None:
    assert not Routers().broadcast.accept(Report("stranger", 1, True, {}, ReplicaLoad()))


async def test_a_load_waits_for_others_and_goes_with_the_next_move() -> None:
    routers = Routers()
    routers.now_s = 10.0
    routers.report(1, x="gpu")
    first = await routers.broadcast.routes("e", 0)
    assert first.tiers == [("r1", "x", "gpu")]
    routers.now_s += 2.0
    routers.report(2)
    assert (await routers.broadcast.routes("e", first.version)).version == first.version, "only its load has changed"
    routers.report(2, y="cpu")
    second = await routers.broadcast.routes("e", first.version)
    assert (second.tiers, second.loads) == ([("r1", "y", "cpu")], {"r1": ReplicaLoad(num_running=2, cpu_loras=0)})


async def test_a_publication_wakes_all_polls_with_one_answer() -> None:
    routers = Routers()
    routers.now_s = 10.0
    polls = [asyncio.create_task(routers.broadcast.routes("e", 0)) for _ in range(3)]
    await asyncio.sleep(0)
    routers.report(1, x="gpu")
    first, *others = await asyncio.gather(*polls)
    assert all(answer is first for answer in others)
