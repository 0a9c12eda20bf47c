"""In tiles of one size and one variant of the kernels, what an adapter adds to a token has the same bits in every
batch, as --batch-invariant needs it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8
from tests.kernels.harness import run_interpreted
from tests.kernels.lora_cases import make_inputs, make_packed, slots_of_tokens

RANKS = ((3, 17), None, (16, 16), (2, 1), (70, 0))
MAX_RANK = 128


def check(packed: PackedLoRA, num_tokens: int, dtype: torch.dtype) -> None:
    from lorafleet.kernels.lora.lora_triton import lora_delta_triton

    slots = [*slots_of_tokens("some_base", num_tokens, len(RANKS)), 0, 1, 2, 3, 4]
    x_TD, _ = make_inputs(packed, len(slots), dtype=dtype)

    def delta(tokens: Sequence[int]) -> Tensor:
        batch = LoRABatch.build([slots[t] for t in tokens], packed.tables, MAX_RANK)
        assert batch is not None
        batch.addresses.look_up()
        found = lora_delta_triton(x_TD[list(tokens)].contiguous(), packed, batch)
        assert found is not None
        return found

    whole = delta(range(len(slots)))
    adapted = [t for t, slot in enumerate(slots) if slot >= 0]
    assert whole[adapted].abs().max() > 0
    for tokens in ([adapted[0]], adapted[:2], adapted[-4:], range(5, len(slots)), range(0, len(slots), 2)):
        if any(slots[t] >= 0 for t in tokens):
            assert torch.equal(delta(tokens), whole[list(tokens)])


def test_interpreted_kernels() -> None:
    run_interpreted("""
        from lorafleet.kernels.quant.fp8 import FP8
        from tests.kernels.interpreter import add_in_order
        from tests.kernels.lora.test_fixed_tiles import RANKS, check
        from tests.kernels.lora_cases import make_packed

        add_in_order()
        for lora_dtype, dtype in ((torch.float32, torch.float32), (FP8, torch.float16)):
            check(make_packed(48, (40, 24), RANKS, lora_dtype), 19, dtype)
        check(make_packed(530, (9,), RANKS, torch.float16), 8, torch.float16)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("lora_dtype", [torch.bfloat16, FP8], ids=str)
    @pytest.mark.parametrize("num_tokens", [40, 900])
    def test_compiled_kernels(self, num_tokens: int, lora_dtype: torch.dtype) -> None:
        check(make_packed(4096, (4096, 1024), RANKS, lora_dtype, "cuda"), num_tokens, torch.bfloat16)
