from __future__ import annotations

import pytest
import torch

from lorafleet.kernels.lora import apply_lora
from lorafleet.kernels.lora_batch import BASE_SLOT, TILE_TOKENS, LoRABatch
from lorafleet.kernels.lora_torch import _apply_grouped, _apply_stacked, apply_lora_torch
from tests.kernels.lora_cases import MIXES, RANKS_OF_SLOTS, build, make_inputs, make_packed, reference, slots_of_tokens

FORMS = {"stacked": _apply_stacked, "grouped": _apply_grouped, "either": apply_lora_torch, "entry": apply_lora}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("out_features", [(48,), (20, 33), (40, 8, 8)])
def test_each_token_gets_its_own_adapter(form: str, mix: str, out_features: tuple[int, ...]) -> None:
    packed = make_packed(37, out_features)
    slots = slots_of_tokens(mix, 29, len(RANKS_OF_SLOTS))
    x, y = make_inputs(packed, len(slots))
    want = reference(x, y, packed, slots)
    FORMS[form](x, y, packed, build(slots))
    torch.testing.assert_close(y.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["stacked", "grouped"])
def test_base_rows_keep_their_bits(form: str) -> None:
    packed = make_packed(32, (16, 16, 16))
    slots = slots_of_tokens("mostly_base", 64, len(RANKS_OF_SLOTS))
    x, y = make_inputs(packed, len(slots))
    before = y.clone()
    FORMS[form](x, y, packed, build(slots))
    base = torch.tensor([slot == BASE_SLOT for slot in slots])
    assert base.sum() > 40
    assert torch.equal(y[base], before[base])


def test_changed_slot_is_seen_by_the_next_step() -> None:
    packed, other = make_packed(32, (16,)), make_packed(32, (16,), ((4,), (4,)))
    x, y = make_inputs(packed, 4)
    slots = [0, 1, 0, 1]
    apply_lora_torch(x, y.clone(), packed, build(slots))
    packed.set_slot(0, other.slots[1])
    want = reference(x, y, packed, slots)
    apply_lora_torch(x, y, packed, build(slots))
    torch.testing.assert_close(y.double(), want, atol=2e-5, rtol=1e-5)
    assert packed.max_total_rank((0,)) == 4
    packed.set_slot(0, None)
    assert packed.max_total_rank((0,)) == 0


def test_batch_of_base_tokens_is_none() -> None:
    assert LoRABatch.build([BASE_SLOT] * 3, torch.device("cpu")) is None


def test_tiles_cover_each_adapter_token_once_and_never_mix_slots() -> None:
    slots = slots_of_tokens("some_base", 200, 5)
    batch = build(slots)
    seen: list[int] = []
    for slot, start, length in batch.tiles_K3.tolist():
        tokens = batch.order_M[start : start + length].tolist()
        assert 1 <= len(tokens) <= TILE_TOKENS
        assert {slots[t] for t in tokens} == {slot}
        seen += tokens
    assert sorted(seen) == [t for t, slot in enumerate(slots) if slot != BASE_SLOT]
