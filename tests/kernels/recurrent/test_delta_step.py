"""A delta net's decode step in one launch against the kernels' twins one after the other, over several steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput, SplitSums
from lorafleet.kernels.recurrent.causal_conv import causal_conv_torch
from lorafleet.kernels.recurrent.delta_rule import HeadGates, delta_rule_torch
from lorafleet.kernels.recurrent.delta_step import (
    MOST_TOKENS,
    DeltaColumns,
    DeltaWeights,
    HeadColumns,
    delta_step,
    delta_step_torch,
)
from lorafleet.kernels.recurrent.gated_norm import gated_norm_torch
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch
from tests.kernels.harness import run_interpreted

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
STEPS, HIDDEN = 3, 24
# Key heads, value heads, numbers of a key and of a value.
SIZES = {"two value heads a key head": (2, 4, 8, 12), "one": (3, 3, 12, 8)}
LARGE = 16, 32, 128, 128  # of Qwen3.5
Step = Callable[..., Tensor]


def columns_of(layout: str, groups: int, ratio: int, k_dim: int, v_dim: int) -> tuple[DeltaColumns, int, int]:
    """Returns where the parts lie, and the width of a row of either linear."""
    keys, own = groups * k_dim, ratio * v_dim
    if layout == "grouped":
        width = 2 * k_dim + 2 * own
        parts = (0, k_dim, 2 * k_dim, 2 * k_dim + own)
        places = [HeadColumns(first, width) for first in parts]
        columns = DeltaColumns(*places, HeadColumns(0, 2 * ratio), HeadColumns(ratio, 2 * ratio))
        return columns, groups * width, 2 * groups * ratio
    q, k, v = HeadColumns(0, k_dim), HeadColumns(keys, k_dim), HeadColumns(2 * keys, own)
    values, heads = groups * own, groups * ratio
    gate = HeadColumns(2 * keys + values, own)
    columns = DeltaColumns(q, k, v, gate, HeadColumns(0, ratio), HeadColumns(heads, ratio))
    return columns, 2 * keys + 2 * values, 2 * heads


def by_twins(
    first_TN: Tensor, x_TD: Tensor, weights: DeltaWeights, conv: Tensor, memory: Tensor, batch: RecurrentBatch
) -> Tensor:
    """Computes the step by the twins of its kernels, from rows whose parts are picked one by one."""
    groups, (_, heads, k_dim, v_dim), columns = weights.num_k_heads, memory.shape, weights.columns
    ratio, second_TN = heads // groups, x_TD @ weights.second_ND.T

    def picked(rows: Tensor, place: HeadColumns, size: int) -> Tensor:
        return torch.cat([rows[:, place.first + g * place.group :][:, :size] for g in range(groups)], dim=1)

    own = ratio * v_dim
    parts = picked(first_TN, columns.q, k_dim), picked(first_TN, columns.k, k_dim), picked(first_TN, columns.v, own)
    mixed = causal_conv_torch(torch.cat(parts, dim=1), weights.conv_CK, conv, batch)
    b, a = picked(second_TN, columns.b, ratio), picked(second_TN, columns.a, ratio)
    gates = HeadGates(b, a, weights.a_log_H, weights.dt_bias_H, weights.beta_scale)
    out = delta_rule_torch(mixed, gates, memory, groups, batch)
    return gated_norm_torch(out, picked(first_TN, columns.gate, own).view_as(out), weights.norm_V, weights.eps)


def check(
    step: Step,
    layout: str,
    sizes: tuple[int, int, int, int],
    tokens: int = 3,
    in_sums: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    early: bool = False,
) -> None:
    groups, heads, k_dim, v_dim = sizes
    columns, first_width, second_width = columns_of(layout, groups, heads // groups, k_dim, v_dim)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    channels, slots = 2 * groups * k_dim + heads * v_dim, [2 * i for i in range(tokens)]
    weights = DeltaWeights(
        normal(second_width, HIDDEN) / HIDDEN**0.5,
        columns,
        groups,
        normal(channels, 4),
        torch.rand(heads, generator=random).to(device).mul(8).log(),
        normal(heads).float(),
        1.0,
        normal(v_dim),
        1e-6,
        torch.zeros(MOST_TOKENS, groups, dtype=torch.int32, device=device),
        early,
    )
    conv = normal(2 * tokens, channels, 3)
    memory = torch.randn(2 * tokens, heads, k_dim, v_dim, generator=random).to(device)
    wanted_conv, wanted_memory = conv.clone(), memory.clone()
    for i in range(STEPS):
        first, x = normal(tokens, first_width), normal(tokens, HIDDEN)
        begins = [i == 0 and token % 2 == 1 for token in range(tokens)]
        batch = RecurrentBatch.build([1] * tokens, slots, begins, torch.device(device))
        output = LinearOutput(first)
        if in_sums:
            parts = torch.stack((first.float() / 2, first.float() / 2))
            output = LinearOutput(torch.full_like(first, torch.nan), sums=SplitSums(parts, early))
        found = step(output, x, weights, conv, memory, batch)
        wanted = by_twins(first, x, weights, wanted_conv, wanted_memory, batch)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(memory, wanted_memory, atol=tolerance, rtol=tolerance)
        assert torch.equal(conv, wanted_conv) and not weights.arrived_TG.any()


@pytest.mark.parametrize("layout", ["split", "grouped"])
def test_the_twin(layout: str) -> None:
    for sizes in SIZES.values():
        check(delta_step_torch, layout, sizes)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.recurrent.delta_step_triton import delta_step_triton
        from tests.kernels.recurrent.test_delta_step import SIZES, check

        two, one = SIZES.values()
        check(delta_step_triton, "split", two, in_sums=True)
        check(delta_step_triton, "grouped", two, tokens=1)
        check(delta_step_triton, "split", one, tokens=2)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("layout", ["split", "grouped"])
    def test_all_layouts(self, layout: str, dtype: torch.dtype) -> None:
        for sizes in SIZES.values():
            for tokens in (1, 3, 16):
                check(delta_step, layout, sizes, tokens, False, dtype, "cuda", early=True)
        check(delta_step, layout, SIZES["one"], 3, True, dtype, "cuda", early=False)

    def test_a_large_layer(self) -> None:
        check(delta_step, "split", LARGE, 8, False, torch.float32, "cuda", early=True)
