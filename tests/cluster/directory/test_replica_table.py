"""The table of replicas alone, under a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.replica_table import ReplicaTable
from lorafleet.protocol.errors import AdapterMissing, Overloaded, to_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest

TIMING = DirectoryTiming(gather_s=0.0)
LORA = LoRARequest("sql", 1, "/sql", "digest")
INFO = AdapterInfo("digest", 8, 1, [])


class Table:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_changes = 0
        self.left: list[str] = []
        self.replicas = ReplicaTable(TIMING, lambda: self.now_s, self._count, self.left.append)

    def _count(self) -> None:
        self.num_changes += 1


async def test_joins_that_come_together_are_one_change() -> None:
    table = Table()
    for name in ("r1", "r2", "r3"):
        table.replicas.join(name, is_ready=name != "r3")
    assert table.num_changes == 0
    await asyncio.sleep(0.01)
    assert table.num_changes == 1
    assert table.replicas.ready() == ["r1", "r2"]


async def test_a_silent_replica_is_not_live_and_then_forgotten() -> None:
    table = Table()
    table.replicas.join("r1", is_ready=True)
    table.replicas.notice_silent()
    table.now_s = TIMING.acknowledge_s + TIMING.hold_s
    assert table.replicas.live() == []
    table.replicas.notice_silent()
    assert (table.num_changes, table.left) == (2, []), "it was ready, and is not"
    table.now_s = TIMING.forget_s + 1
    table.replicas.join("r2", is_ready=True)
    assert table.left == ["r1"] and "r1" not in table.replicas


async def test_an_order_ends_with_its_answer_or_with_its_replica() -> None:
    replicas = Table().replicas
    replicas.join("r1", is_ready=True)
    read, pinned, lost = [replicas.order("r1", kind, LORA) for kind in ("load", "pin", "load")]  # type: ignore[arg-type]
    assert [order.number for order in replicas.record_call("r1").orders_after(1)] == [2, 3]
    replicas.end_order("r1", 1, INFO, None)
    replicas.end_order("r1", 1, INFO, None)
    replicas.end_order("r1", 2, None, to_wire(AdapterMissing("no files")))
    replicas.forget("r1")
    assert await read == INFO
    with pytest.raises(AdapterMissing):
        await pinned
    with pytest.raises(Overloaded, match="has left"):
        await lost
    assert [failure.adapter for failure in replicas.failures.of(None, of_all=True)] == ["sql"]


async def test_a_change_is_acknowledged_when_every_live_replica_knows_it() -> None:
    table = Table()
    for name in ("r1", "r2"):
        table.replicas.join(name, is_ready=True).acknowledged = 7
    assert table.replicas.have_acknowledged(7) and not table.replicas.have_acknowledged(8)
    table.replicas.record_call("r1").acknowledged = 8
    assert not table.replicas.have_acknowledged(8)
    table.now_s = TIMING.acknowledge_s + TIMING.hold_s
    table.replicas.record_call("r1")
    assert table.replicas.have_acknowledged(8), "r2 is silent"
