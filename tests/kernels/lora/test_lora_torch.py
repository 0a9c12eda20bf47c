from __future__ import annotations

import itertools
import random

import pytest
import torch

from lorafleet.kernels.lora.apply_lora import apply_lora
from lorafleet.kernels.lora.lora_batch import (
    BASE_SLOT,
    PREFILL_TILE_TOKENS,
    TILE_TOKENS,
    LoRABatch,
    count_tiles,
    static_tile_counts,
)
from lorafleet.kernels.lora.lora_torch import _apply_grouped, _apply_stacked, apply_lora_torch
from lorafleet.kernels.lora.packed_lora import LoRATables
from lorafleet.kernels.quant.fp8 import FP8
from tests.kernels.lora_cases import MIXES, RANKS_OF_SLOTS, build, make_inputs, make_packed, reference, slots_of_tokens

FORMS = {"stacked": _apply_stacked, "grouped": _apply_grouped, "either": apply_lora_torch, "entry": apply_lora}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("out_features", [(48,), (20, 33), (40, 8, 8)])
@pytest.mark.parametrize("lora_dtype", [torch.float32, FP8], ids=str)
def test_each_token_gets_its_own_adapter(
    lora_dtype: torch.dtype, form: str, mix: str, out_features: tuple[int, ...]
) -> None:
    packed = make_packed(37, out_features, dtype=lora_dtype)
    slots = slots_of_tokens(mix, 29, len(RANKS_OF_SLOTS))
    x, y = make_inputs(packed, len(slots), dtype=torch.float32)
    want = reference(x, y, packed, slots)
    FORMS[form](x, y, packed, build(slots, packed))
    torch.testing.assert_close(y.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_weights_are_exact_whatever_the_bases_dtype(dtype: torch.dtype) -> None:
    """Sums of numbers up to 448 would overflow float16, and scales that small vanish in it."""
    packed = make_packed(512, (64, 64), dtype=FP8)
    slots = slots_of_tokens("zipf", 40, len(RANKS_OF_SLOTS))
    x, _ = make_inputs(packed, len(slots), dtype=dtype)
    y = torch.zeros(40, 128, dtype=dtype)
    want = reference(8 * x, y, packed, slots)
    apply_lora(8 * x, y, packed, build(slots, packed))
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("form", ["stacked", "grouped"])
def test_base_rows_keep_their_bits(form: str) -> None:
    packed = make_packed(32, (16, 16, 16))
    slots = slots_of_tokens("mostly_base", 64, len(RANKS_OF_SLOTS))
    x, y = make_inputs(packed, len(slots))
    before = y.clone()
    FORMS[form](x, y, packed, build(slots, packed))
    base = torch.tensor([slot == BASE_SLOT for slot in slots])
    assert base.sum() > 40
    assert torch.equal(y[base], before[base])


def test_changed_slot_is_seen_by_the_next_step() -> None:
    packed, other = make_packed(32, (16,)), make_packed(32, (16,), ((4,), (4,)))
    x, y = make_inputs(packed, 4)
    slots = [0, 1, 0, 1]
    apply_lora_torch(x, y.clone(), packed, build(slots, packed))
    packed.set_slot(0, other.slots[1])
    want = reference(x, y, packed, slots)
    apply_lora_torch(x, y, packed, build(slots, packed))
    torch.testing.assert_close(y.double(), want, atol=2e-5, rtol=1e-5)


def test_batch_of_base_tokens_is_none() -> None:
    assert LoRABatch.build([BASE_SLOT] * 3, tables(4)) is None


def tables(num_slots: int) -> LoRATables:
    return LoRATables(1, num_slots, torch.device("cpu"))


def tiles(batch: LoRABatch) -> list[tuple[int, list[int]]]:
    """Each tile that is not empty: its slot and its tokens."""
    rows = zip(batch.plan.slot_K.tolist(), batch.plan.tokens_KM.tolist(), strict=True)
    return [(slot, [t for t in row if t >= 0]) for slot, row in rows if row[0] >= 0]


@pytest.mark.parametrize("tile_tokens", [TILE_TOKENS, PREFILL_TILE_TOKENS])
def test_tiles_cover_each_token_once_and_never_mix_slots(tile_tokens: int) -> None:
    slots = slots_of_tokens("some_base", 200, 5)
    batch = LoRABatch.build(slots, tables(5), tile_tokens=tile_tokens)
    assert batch is not None
    seen: list[int] = []
    for slot, tokens in tiles(batch):
        assert 1 <= len(tokens) <= tile_tokens
        assert {slots[t] for t in tokens} == {slot}
        seen += tokens
    assert sorted(seen) == list(range(200)), "base tokens have tiles too"


def test_static_batch_keeps_its_memory_and_takes_any_mix() -> None:
    batch = LoRABatch.static(40, static_tile_counts(40, 5)[-1], 24, tables(5))
    address = batch.plan.buffer.data_ptr()
    for mix in MIXES:
        slots = slots_of_tokens(mix, 33, 5)
        batch.fill(slots, [24, 8, 16, 3, 0])
        assert batch.plan.buffer.data_ptr() == address
        found = tiles(batch)
        assert sorted(t for _, tokens in found for t in tokens) == list(range(40))
        assert {t: slot for slot, tokens in found for t in tokens} == dict(enumerate(slots + [BASE_SLOT] * 7))
        assert len(found) == count_tiles(slots, 40)
        order = batch.plan.order_T.tolist()
        assert sorted(order) == list(range(40))
        in_order = batch.plan.slot_T[order].tolist()
        assert len(list(itertools.groupby(in_order))) == len(set(in_order)), "tokens of a slot follow each other"
    batch.fill([BASE_SLOT] * 40, [0] * 5)
    assert {slot for slot, _ in tiles(batch)} == {BASE_SLOT}


def test_static_batch_copies_nothing_if_the_slots_stay() -> None:
    batch = LoRABatch.static(6, static_tile_counts(6, 5)[-1], 24, tables(5))
    slots = [3, 3, BASE_SLOT, 1]
    batch.fill(slots, [8] * 5)
    batch.plan.buffer.fill_(77)
    batch.fill([*slots, BASE_SLOT], [8] * 5)
    assert (batch.plan.buffer == 77).all()
    batch.fill([3, 3, 1, BASE_SLOT], [8] * 5)
    assert batch.plan.slot_T.tolist() == [3, 3, 1] + [BASE_SLOT] * 3
    batch.fill(slots, [8] * 5)
    assert batch.plan.slot_T.tolist() == [*slots, BASE_SLOT, BASE_SLOT]


def test_static_batch_has_room_for_the_worst_mix() -> None:
    sizes = ((1, 4), (7, 3), (64, 8), (64, 64), (256, 64), (2048, 5))
    for (num_tokens, num_slots), tile_tokens in itertools.product(sizes, (TILE_TOKENS, PREFILL_TILE_TOKENS)):
        counts = static_tile_counts(num_tokens, num_slots, tile_tokens)
        assert counts == sorted(set(counts))
        batch = LoRABatch.static(num_tokens, counts[-1], 64, tables(num_slots), tile_tokens)
        rng = random.Random(num_tokens)
        for _ in range(20):
            batch.fill([rng.randrange(-1, num_slots) for _ in range(num_tokens)], [64] * num_slots)
        batch.fill([t % num_slots for t in range(num_tokens)], [64] * num_slots)


@pytest.mark.parametrize("form", ["stacked", "grouped"])
def test_what_overflows_in_one_adapter_reaches_no_other_row(form: str) -> None:
    packed = make_packed(32, (16, 16), ((8, 8), (8, 8)))
    slots = [0, 1, BASE_SLOT, 1, 0]
    x, y = make_inputs(packed, len(slots))
    want = y.clone()
    FORMS[form](x, want, packed, build(slots, packed))
    weights = packed.slots[0]
    assert weights is not None
    weights.a_RD.fill_(torch.finfo(weights.a_RD.dtype).max)
    packed.set_slot(0, weights)
    FORMS[form](x, y, packed, build(slots, packed))
    others = torch.tensor([slot != 0 for slot in slots])
    assert not y[~others].isfinite().all()
    assert torch.equal(y[others], want[others])
