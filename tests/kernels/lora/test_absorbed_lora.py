"""The adapters' share in absorbed weights, against merged weights in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.extras.linear_extras import LinearExtras
from lorafleet.kernels.lora.absorbed_lora import HeadRows, add_to_queries, add_to_values, scale_queries
from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.lora_cases import build, make_packed, slots_of_tokens

HEADS, LATENT = 3, 40
KEYS, VALUES = HeadRows(28, 0, 12), HeadRows(28, 12, 16)
RANKS = ((16,), (1,), None, (70,), (7,))
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def with_extras(packed: PackedLoRA) -> PackedLoRA:
    """Gives slots a scale, a bias, both and none, without A and B too."""
    device = packed.tables.address_LSA.device
    size, generator = sum(packed.out_features), torch.Generator().manual_seed(3)
    for slot in range(len(packed.slots) - 1):
        scale_O, bias_O = (torch.randn(size, generator=generator).to(device) for _ in range(2))
        packed.extras[slot] = LinearExtras(scale_O if slot % 2 == 0 else None, bias_O if slot % 3 else None, (None,))
        address = packed.tables.extras.address_VS
        row = packed.tables.extras.affine_row(packed.index)
        extras = packed.extras[slot]
        for i, vector in enumerate((extras.scale_O, extras.bias_O)):
            address[row + i, slot] = 0 if vector is None else vector.data_ptr()
    return packed


def weight_of(packed: PackedLoRA, slot: int, weight_OC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the slot's weight and bias, in float64."""
    bias_O = weight_OC.new_zeros(len(weight_OC), dtype=torch.float64)
    weight_OC = weight_OC.double()
    if slot == BASE_SLOT:
        return weight_OC, bias_O
    weights, extras = packed.slots[slot], packed.extras[slot]
    if weights is not None and weights.b[0] is not None:
        a_RC = weights.a_RD.double()
        if weights.row_scale_R is not None:
            a_RC *= weights.row_scale_R.double().unsqueeze(1)
        weight_OC = weight_OC + weights.scales[0] * weights.b[0].double() @ a_RC
    if extras is not None and extras.scale_O is not None:
        weight_OC = weight_OC * extras.scale_O.double().unsqueeze(1)
    return weight_OC, bias_O if extras is None or extras.bias_O is None else extras.bias_O.double()


def check(packed: PackedLoRA, slot_of_token: Sequence[int], dtype: torch.dtype) -> None:
    """The queries and results lie in wider tensors, as in the model."""
    device = packed.tables.address_LSA.device
    num_tokens, generator = len(slot_of_token), torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight_OC = normal(HEADS * KEYS.of_head, LATENT)
    q_THK, u_THC = normal(num_tokens, HEADS, KEYS.count + 5)[..., : KEYS.count], normal(num_tokens, HEADS, LATENT)
    want_q, want_v = [], []
    for t, slot in enumerate(slot_of_token):
        own_OC, own_O = weight_of(packed, slot, weight_OC)
        want_q.append(torch.einsum("hk,hkc->hc", q_THK[t].double(), KEYS.part_of(own_OC)))
        want_v.append(torch.einsum("hc,hvc->hv", u_THC[t].double(), VALUES.part_of(own_OC)) + VALUES.part_of(own_O))
    batch = build(slot_of_token, packed)
    scale_queries(q_THK, KEYS, packed, batch)
    absorbed_THC = normal(num_tokens, HEADS, LATENT + 3)[..., :LATENT]
    absorbed_THC.copy_(torch.einsum("thk,hkc->thc", q_THK, KEYS.part_of(weight_OC)))
    out_THV = torch.einsum("thc,hvc->thv", u_THC, VALUES.part_of(weight_OC)).contiguous()
    if device.type == "cuda":
        poison_free_memory()
    add_to_queries(q_THK, absorbed_THC, KEYS, packed, batch)
    add_to_values(u_THC, out_THV, VALUES, packed, batch)
    for found, wants in ((absorbed_THC, want_q), (out_THV, want_v)):
        want = torch.stack(wants)
        error = ((found.double() - want).abs() / (want.square().mean().sqrt() + want.abs())).max()
        assert error < TOLERANCE[dtype], error


def packed_of(dtype: torch.dtype, device: str = "cpu") -> PackedLoRA:
    return with_extras(make_packed(LATENT, (HEADS * KEYS.of_head,), RANKS, dtype, device))


@pytest.mark.parametrize("mix", ["one", "all_different", "some_base"])
@pytest.mark.parametrize("dtype", [*TOLERANCE, FP8], ids=str)
def test_on_a_cpu(dtype: torch.dtype, mix: str) -> None:
    compute = torch.float32 if dtype == FP8 else dtype
    check(packed_of(dtype), slots_of_tokens(mix, 13, len(RANKS)), compute)
    check(packed_of(torch.float32), slots_of_tokens(mix, 3, len(RANKS)), compute)  # adapters of another dtype


def test_interpreted_kernels() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.lora import absorbed_lora, absorbed_lora_triton
        from tests.kernels.lora_cases import slots_of_tokens
        from tests.kernels.lora.test_absorbed_lora import RANKS, check, packed_of

        def absorb(q, out, rows, packed, batch):
            absorbed_lora_triton.add_absorbed(q, out, rows.of_head, rows.first, packed, batch, starts_with_b=True)

        def affine(x, rows, packed, batch, has_bias):
            addresses = batch.addresses.affine(packed.index)
            absorbed_lora_triton.apply_head_affine(x, rows.of_head, rows.first, addresses, has_bias)

        def values(u, out, rows, packed, batch):
            absorbed_lora_triton.add_absorbed(u, out, rows.of_head, rows.first, packed, batch, starts_with_b=False)
            affine(out, rows, packed, batch, True)

        import tests.kernels.lora.test_absorbed_lora as tests
        tests.add_to_queries, tests.add_to_values = absorb, values
        tests.scale_queries = lambda q, rows, packed, batch: affine(q, rows, packed, batch, False)
        absorbed_lora_triton.BLOCK = 16
        check(packed_of(torch.float32), slots_of_tokens("all_different", 23, len(RANKS)), torch.float32)
        check(packed_of(torch.float16), slots_of_tokens("some_base", 5, len(RANKS)), torch.float16)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("num_tokens", [1, 37, 600])
    @pytest.mark.parametrize("mix", ["one", "all_different", "some_base"])
    @pytest.mark.parametrize("dtype", [*TOLERANCE, FP8], ids=str)
    def test_equals_merged_weights(self, dtype: torch.dtype, mix: str, num_tokens: int) -> None:
        compute = torch.bfloat16 if dtype == FP8 else dtype
        check(packed_of(dtype, "cuda"), slots_of_tokens(mix, num_tokens, len(RANKS)), compute)
