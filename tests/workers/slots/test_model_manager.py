"""Filling slots on a GPU, beside steps that are still queued."""

from __future__ import annotations

import pytest
import torch

from lorafleet.kernels.lora.packed_lora import AdapterTable
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.lora_memory import Extent
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import LoadTimes, PackedAdapter
from lorafleet.workers.slots.pinned_memory import PIECE_BYTES, PinnedMemory
from lorafleet.workers.slots.slot_policy import Slot
from lorafleet.workers.tp.group import TPGroup

pytestmark = pytest.mark.gpu

ADAPTER_BYTES = 2 * PIECE_BYTES + 12288
MATRIX_BYTES = 256 * 1024
LONG = 400_000_000  # cycles of a kernel that does nothing, about 0.2 s


class Slots:
    """A manager with memory of many pieces, and adapters of random bytes."""

    def __init__(self, base, max_loras: int, room_for: int) -> None:
        """`room_for` is the number of adapters whose bytes have room."""
        device = torch.device("cuda", torch.cuda.current_device())
        model = DecoderModel(read_model_config(base), TPGroup(), torch.bfloat16, device)
        self.num_linears = len(model.packed_linears())
        config = LoRAConfig(max_loras=max_loras, lora_memory_gib=room_for * ADAPTER_BYTES / 2**30)
        self.manager = LoRAModelManager(model, config, torch.bfloat16, device)
        self.memory = PinnedMemory()

    def adapter(self, digest: str, extra_bytes: int = 0) -> PackedAdapter:
        block = self.memory.take(ADAPTER_BYTES)
        block.random_(0, 256)
        self.memory.pin(block)
        table = AdapterTable.empty(self.num_linears)
        offsets = torch.arange(2 * self.num_linears).view(-1, 2) * MATRIX_BYTES
        table.offset_LA[:, :2], table.rank_LP[:, 0] = offsets.numpy(), 8
        info = AdapterInfo(digest, 8, block.numel(), ["q_proj"])
        extra = None
        if extra_bytes:
            extra = ExtraBlock.of({"vector": torch.randn(extra_bytes // 4)}, self.memory.take)
            self.memory.pin(extra.block)
        return PackedAdapter(info, block, torch.bfloat16, table, LoadTimes(0, 0, 0), extra)

    def content(self, slot: Slot) -> torch.Tensor:
        """The adapter's bytes in the order of its block."""
        assert slot.adapter is not None and self.manager.arena is not None
        arena = self.manager.arena
        return torch.cat([arena[extent.start : extent.start + extent.num_bytes] for extent in slot.extents])


@pytest.fixture
def slots(fleet):
    return Slots(fleet("llama3").base, max_loras=2, room_for=2)


def activate(slots: Slots, adapter: PackedAdapter, wait: bool = True) -> Slot:
    manager = slots.manager
    slot = manager.room.victim(adapter)
    assert slot is not None
    for victim in manager.room.to_empty(adapter, slot) or ():
        manager.evict(victim)
    manager.activate(adapter, slot)
    if wait:
        slots.manager.wait_for_copies()
        assert slot.is_ready
    return slot


def test_a_slot_gets_the_adapters_bytes_and_its_table_row(slots):
    adapter = slots.adapter("a")
    slot = activate(slots, adapter)
    assert torch.equal(slots.content(slot).cpu(), adapter.block)
    tables = slots.manager.tables
    [extent] = slot.extents
    first = slots.manager.arena.data_ptr() + extent.start
    expected = [
        [first + 2 * i * MATRIX_BYTES, first + (2 * i + 1) * MATRIX_BYTES, 0, 0] for i in range(slots.num_linears)
    ]
    assert tables.address_LSA[:, slot.index].tolist() == expected
    assert tables.rank_LSP[:, slot.index].tolist() == [[8, 0, 0]] * slots.num_linears


def test_a_slot_is_not_overwritten_before_the_steps_that_read_it_have_ended(slots):
    slot = activate(slots, slots.adapter("old"))
    other = activate(slots, slots.adapter("other"))
    slots.manager.policy.hold(other.index)
    slots.manager.policy.hold(slot.index)
    old = slots.content(slot).cpu()
    torch.cuda._sleep(LONG)
    seen_by_the_step = slots.content(slot).clone()
    slots.manager.policy.let_go(slot.index)
    new = slots.adapter("new")
    filled = activate(slots, new, wait=False)
    assert slot.digest is None and filled.extents and not filled.is_ready
    torch.cuda.synchronize()
    assert torch.equal(seen_by_the_step.cpu(), old)
    assert filled.is_ready and slot.generation == 1
    assert torch.equal(slots.content(filled).cpu(), new.block)


def test_an_adapter_fills_the_ranges_that_others_have_left(slots):
    """They are cut between matrices, so the kernels find each matrix whole."""
    first, second = (activate(slots, slots.adapter(name)) for name in "ab")
    sizes = [3 * MATRIX_BYTES, ADAPTER_BYTES - 2 * MATRIX_BYTES]
    slots.manager.evict(first)
    slots.manager.evict(second)
    slots.manager.policy.memory.take([Extent(sizes[0], MATRIX_BYTES, 1), Extent(sizes[0] + sizes[1], MATRIX_BYTES, 1)])
    adapter = slots.adapter("cut")
    slot = activate(slots, adapter)
    assert len(slot.extents) == 2
    assert torch.equal(slots.content(slot).cpu(), adapter.block)
    offsets = adapter.table.offset_LA[:, :2].reshape(-1).tolist()
    addresses = slots.manager.tables.address_LSA[:, slot.index, :2].reshape(-1).tolist()
    arena = slots.manager.arena
    for offset, address in zip(offsets, addresses, strict=True):
        begin = address - arena.data_ptr()
        size = min(MATRIX_BYTES, adapter.block.numel() - offset)
        assert torch.equal(arena[begin : begin + size].cpu(), adapter.block[offset : offset + size])


def test_a_slot_that_no_queued_step_reads_is_filled_beside_them(slots):
    adapter = slots.adapter("a")
    step_ended = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    step_ended.record()
    slot = activate(slots, adapter)
    assert not step_ended.query(), "the copy has waited for a step that has nothing to do with it"
    assert torch.equal(slots.content(slot).cpu(), adapter.block)


def test_extras_stay_until_the_steps_that_read_them_have_ended(slots):
    size = 2 * PIECE_BYTES + 512
    adapter, memory = slots.adapter("a", size), slots.manager.extra_memory
    memory.limit = size
    slot = activate(slots, adapter)
    assert slot.extra is not None and torch.equal(slot.extra.block.cpu(), adapter.extra.block)
    slots.manager.policy.hold(slot.index)
    torch.cuda._sleep(LONG)
    seen_by_the_step = slot.extra.block.clone()
    slots.manager.policy.let_go(slot.index)
    slots.manager.evict(slot)
    assert memory.num_bytes == 0 and not memory.is_free(size), "a queued step reads them"
    torch.cuda.synchronize()
    assert memory.is_free(size)
    assert torch.equal(seen_by_the_step.cpu(), adapter.extra.block)
    assert activate(slots, slots.adapter("b", size)).extra is not None
