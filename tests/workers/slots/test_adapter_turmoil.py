"""Orders in any sequence, with loads and copies that end at any time: states stay true, and nothing is left behind."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import accumulate
from random import Random
from types import SimpleNamespace

import pytest
import torch

from lorafleet.kernels.lora.packed_lora import AdapterTable
from lorafleet.protocol.errors import AdapterError, AdapterMissing
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.workers.slots.adapter_lives import AdapterState
from lorafleet.workers.slots.eviction import Demand
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.extra_memory import ExtraMemory
from lorafleet.workers.slots.lora_memory import LoRAMemory
from lorafleet.workers.slots.packed_adapter import LoadTimes, PackedAdapter
from lorafleet.workers.slots.slot_policy import Slot, SlotPolicy
from lorafleet.workers.slots.slot_room import SlotRoom
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager

TENANTS = ("", "t1", "t2")
BYTES_OF_A_SLOT = 1200


class Copy:
    """An event that passes when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


class Writer:
    """Stands in for LoRAModelManager, and writes nothing."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.extras = ExtraMemory(100, torch.device("cpu"))
        self.memory, demand = LoRAMemory(BYTES_OF_A_SLOT * num_slots), Demand(capacity, lambda: 0.0)
        self.policy = SlotPolicy(num_slots, num_slots - 1, demand, self.memory, self.extras, lambda _: None)
        self.room = SlotRoom(self.policy)

    def activate(self, adapter: PackedAdapter, slot: Slot, tenant: str) -> None:
        extents = self.memory.find(adapter.cuts)
        assert extents is not None
        self.memory.take(extents)
        slot.extents = tuple(extents)
        slot.extra = None if adapter.extra is None else self.extras.place(adapter.extra)
        slot.ready = Copy()
        self.policy.assign(slot, adapter, tenant)

    def evict(self, slot: Slot) -> None:
        self.deactivate(slot, for_room=True)

    def deactivate(self, slot: Slot, *, for_room: bool = False) -> None:
        if slot.digest is not None:
            self.memory.give_back(slot.extents)
            if slot.extra is not None:
                self.extras.give_back(slot.extra, None)
            self.policy.clear(slot, for_room=for_room)


class Loader:
    def __init__(self) -> None:
        self.loads: list[tuple[LoRARequest, Future[PackedAdapter]]] = []

    def submit(self, lora: LoRARequest) -> Future[PackedAdapter]:
        self.loads.append((lora, Future()))
        return self.loads[-1][1]

    def is_here(self, lora: LoRARequest) -> bool:
        return lora.lora_path.startswith("/")


class Worker:
    """A manager of few slots, and requests for a few more adapters under several paths."""

    def __init__(self, random: Random) -> None:
        self.random = random
        num_slots = random.randint(2, 4)
        capacity = random.randint(num_slots, num_slots + 3)
        self.digests = [f"d{i}" for i in range(random.randint(2, 9))]
        self.loader, self.held = Loader(), list[int]()
        self.answers: list[Future[AdapterInfo]] = []
        self.manager = WorkerLoRAManager(
            SimpleNamespace(cpu_loras=capacity), Writer(num_slots, capacity), self.loader, None
        )

    def lora(self, digest: str = "") -> LoRARequest:
        digest = digest or self.random.choice(self.digests)
        path, known = self.random.choice(("/a/", "s3://b/")) + digest, self.random.random() < 0.9
        return LoRARequest(digest, 1, path, digest if known else "")

    def act(self) -> None:
        manager, random, digest = self.manager, self.random, self.random.choice(self.digests)
        act = random.choice(("load", "load", "pin", "drop", "unpin", *["end", "step", "hold", "let go", "copy"] * 2))
        if act == "load":
            self.answers.append(manager.load(self.lora()))
        elif act == "pin" and len(manager.filler.pins.keys() | {digest}) < len(manager.slots.slots):
            self.answers.append(manager.pin(LoRARequest(digest, 1, f"/a/{digest}", digest)))
        elif act == "drop":
            manager.drop(digest)
        elif act == "unpin":
            manager.unpin(digest)
        elif act == "end" and self.loader.loads:
            self.end_load(random.randrange(len(self.loader.loads)), fails=random.random() < 0.2)
        elif act == "step":
            self.step(random.sample(self.digests, random.randint(0, len(self.digests))))
        elif act == "hold" and (slot := manager.slots.find(digest)) is not None and slot.is_ready:
            if not manager.slots.may_use(slot.index):
                return
            manager.slots.hold(slot.index, random.choice(TENANTS))
            self.held.append(slot.index)
        elif act == "let go" and self.held:
            manager.slots.let_go(self.held.pop(random.randrange(len(self.held))))
        elif act == "copy" and (slot := manager.slots.find(digest)) is not None and slot.ready is not None:
            slot.ready.ended = True

    def end_load(self, index: int, *, fails: bool) -> None:
        lora, future = self.loader.loads.pop(index)
        if fails:
            future.set_exception(AdapterMissing("gone"))
            return
        digest = lora.lora_name
        extra = ExtraBlock(torch.empty(40, dtype=torch.uint8), {}) if digest in ("d1", "d4") else None
        num_bytes = BYTES_OF_A_SLOT * (2 + self.digests.index(digest)) // 4  # most are larger than a slot's share
        info, block = AdapterInfo(digest, 8, num_bytes, ["q_proj"]), torch.empty(num_bytes, dtype=torch.uint8)
        table = AdapterTable.empty(2)
        table.offset_LA[0, :2], table.offset_LA[1, 0] = (0, num_bytes // 3), num_bytes // 2
        future.set_result(PackedAdapter(info, block, torch.float32, table, LoadTimes(0, 0, 0), extra))

    def step(self, digests: list[str]) -> None:
        self.manager.poll()
        wanted = [LoRARequest(d, 1, self.random.choice(("/a/", "s3://b/")) + d, d) for d in digests]
        self.manager.prefetch(wanted, {d: self.random.choice(TENANTS) for d in digests})

    def check(self) -> None:
        memory = self.manager.slots.memory
        taken = [extent for slot in self.manager.slots.slots for extent in slot.extents]
        assert memory.num_used == sum(extent.num_bytes for extent in taken)
        ranges = sorted([*memory.free_ranges, *((extent.start, extent.num_bytes) for extent in taken)])
        assert [start for start, _ in ranges] == [0, *accumulate(size for _, size in ranges)][:-1]
        assert sum(size for _, size in ranges) == memory.num_bytes
        for digest in self.digests:
            here = digest in self.manager.resident_cpu(), self.manager.slots.find(digest) is not None
            match self.manager._lives.state(digest):
                case AdapterState.IN_HOST:
                    assert here == (True, False)
                case AdapterState.COPYING | AdapterState.IN_SLOT:
                    assert here[1]
                case AdapterState.DROPPING:
                    assert not here[0]
                case AdapterState.READING | AdapterState.GONE:
                    assert here == (False, False)


@pytest.mark.parametrize("seed", range(60))
def test_states_stay_true_and_nothing_is_left_behind(seed: int) -> None:
    worker = Worker(Random(seed))
    for _ in range(150):
        worker.act()
        worker.check()
    for digest in worker.digests:
        worker.manager.drop(digest)
    while worker.held:
        worker.manager.slots.let_go(worker.held.pop())
    while worker.loader.loads:
        worker.end_load(0, fails=False)
    worker.manager.poll()
    for digest in worker.digests:
        worker.manager.drop(digest)
    worker.manager.poll()
    assert all(worker.manager._lives.state(digest) is AdapterState.GONE for digest in worker.digests)
    assert all(answer.done() for answer in worker.answers)
    assert all(isinstance(answer.exception(), AdapterError | None) for answer in worker.answers)
    assert worker.manager.resident_cpu() == [] and not worker.manager.slots.usable_digests
    assert worker.manager.slots.extra_memory.num_bytes == 0
