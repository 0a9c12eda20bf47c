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
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import LoadTimes, PackedAdapter
from lorafleet.workers.slots.pinned_memory import PIECE_BYTES, PinnedMemory
from lorafleet.workers.slots.slot_policy import Slot
from lorafleet.workers.tp.group import TPGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

LONG = 400_000_000  # cycles of a kernel that does nothing, about 0.2 s


class Slots:
    """A manager with slots of many pieces, and adapters of random bytes."""

    def __init__(self, base, max_loras: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        model = DecoderModel(read_model_config(base), TPGroup(), torch.bfloat16, device)
        self.num_linears = len(model.packed_linears())
        config = LoRAConfig(max_loras=max_loras, max_lora_rank=4096)
        self.manager = LoRAModelManager(model, config, torch.bfloat16, device)
        self.memory = PinnedMemory()

    def adapter(self, digest: str, extra_bytes: int = 0) -> PackedAdapter:
        block = self.memory.take(2 * PIECE_BYTES + 12345)
        block.random_(0, 256)
        self.memory.pin(block)
        table = AdapterTable.empty(self.num_linears)
        table.offset_LA[:, :2], table.rank_LP[:, 0] = (0, 256), 8
        info = AdapterInfo(digest, 8, block.numel(), ["q_proj"])
        extra = None
        if extra_bytes:
            extra = ExtraBlock.of({"vector": torch.randn(extra_bytes // 4)}, self.memory.take)
            self.memory.pin(extra.block)
        return PackedAdapter(info, block, torch.bfloat16, table, LoadTimes(0, 0, 0), extra)

    def content(self, slot: Slot) -> torch.Tensor:
        assert slot.adapter is not None and self.manager.arena is not None
        return self.manager.arena[slot.index, : slot.adapter.block.numel()]


@pytest.fixture
def slots(fleet):
    return Slots(fleet("llama3").base, max_loras=2)


def activate(slots: Slots, adapter: PackedAdapter, wait: bool = True) -> Slot:
    slot = slots.manager.policy.victim()
    assert slot is not None
    slots.manager.activate(adapter, slot)
    if wait:
        slots.manager.wait_for_copies()
        assert slot.is_ready
    return slot


def test_a_slot_gets_the_adapters_bytes_and_its_table_row(slots):
    adapter = slots.adapter("a")
    slot = activate(slots, adapter)
    assert torch.equal(slots.content(slot).cpu(), adapter.block)
    tables = slots.manager.tables
    address = slots.content(slot).data_ptr()
    assert tables.address_LSA[:, slot.index].tolist() == [[address, address + 256, 0, 0]] * slots.num_linears
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
    assert activate(slots, new, wait=False) is slot
    assert not slot.is_ready
    torch.cuda.synchronize()
    assert torch.equal(seen_by_the_step.cpu(), old)
    assert slot.is_ready and slot.generation == 1
    assert torch.equal(slots.content(slot).cpu(), new.block)


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
