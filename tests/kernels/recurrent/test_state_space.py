"""The kernels of Mamba-2 layers: twins against transformers' own functions, kernels against their twins."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.recurrent.causal_conv import causal_conv, causal_conv_torch
from lorafleet.kernels.recurrent.gated_norm import gated_norm, gated_norm_torch
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch
from lorafleet.kernels.recurrent.state_space import HeadSteps, state_space, state_space_torch
from tests.kernels.harness import run_interpreted

# Steps of three sequences: the tokens of each, with a slot that stays the sequence's own.
STEPS = [{0: 1, 2: 70, 1: 5}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 200, 0: 3}, {2: 2, 0: 1}]
FEW_TOKENS = [{0: 1, 2: 66, 1: 5}, {0: 1, 1: 1, 2: 1}, {2: 2, 1: 1}]  # for the interpreter
SLOT = {0: 3, 1: 0, 2: 2}
EXACT = 5e-6  # of the largest number; the twin's chunks are about 1e-6 off in float32
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LIMITS = 0.3, 0.9  # which many steps exceed


class Case(NamedTuple):
    """Random inputs of a layer for several sequences, and its weights."""

    groups: int
    heads: int
    k_dim: int
    v_dim: int
    steps: list[dict[int, int]]
    x: dict[int, Tensor]  # [T, C] of each sequence
    dt: dict[int, Tensor]  # [T, H]
    weight_CK: Tensor
    bias_C: Tensor
    a_log_H: Tensor
    dt_bias_H: Tensor
    d_H: Tensor

    @classmethod
    def make(
        cls,
        groups: int = 2,
        heads: int = 4,
        k_dim: int = 8,
        v_dim: int = 12,
        steps: list[dict[int, int]] = STEPS,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Case:
        random = torch.Generator().manual_seed(0)
        channels = 2 * groups * k_dim + heads * v_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device, dtype)

        lengths = {s: sum(step.get(s, 0) for step in steps) for s in SLOT}
        return cls(
            *(groups, heads, k_dim, v_dim, steps),
            {s: normal(n, channels) for s, n in lengths.items()},
            {s: normal(n, heads) for s, n in lengths.items()},
            0.5 * normal(channels, 4),
            normal(channels),
            torch.rand(heads, generator=random).to(device).mul(8).log(),
            *(normal(heads).float() for _ in range(2)),
        )


def in_steps(case: Case, conv: Any, space: Any) -> dict[int, Tensor]:
    """Returns each sequence's results [T, H, V], computed in steps from slots that hold garbage before."""
    weight, device = case.weight_CK, case.weight_CK.device
    conv_SCJ = torch.full((4, len(weight), weight.shape[1] - 1), 7.0, dtype=weight.dtype, device=device)
    memory_SHKV = torch.full((4, case.heads, case.k_dim, case.v_dim), 7.0, device=device)
    done = dict.fromkeys(SLOT, 0)
    found: dict[int, list[Tensor]] = {s: [] for s in SLOT}
    for step in case.steps:
        spans = {s: slice(done[s], done[s] + n) for s, n in step.items()}
        x_TC, dt_TH = (torch.cat([rows[s][span] for s, span in spans.items()]) for rows in (case.x, case.dt))
        batch = RecurrentBatch.build(
            list(step.values()), [SLOT[s] for s in step], [done[s] == 0 for s in step], device=device
        )
        wide_TN = torch.cat((x_TC, dt_TH, x_TC), dim=1)  # rows that lie apart
        channels = x_TC.shape[1]
        mixed_TC = conv(wide_TN[:, :channels], weight, conv_SCJ, batch, case.bias_C)
        dt_TH = wide_TN[:, channels : channels + case.heads]
        heads = HeadSteps(dt_TH, case.a_log_H, case.dt_bias_H, case.d_H, LIMITS)
        out_THV = space(mixed_TC, heads, memory_SHKV, case.groups, batch)
        for s, rows in zip(step, out_THV.split(list(step.values())), strict=True):
            found[s].append(rows)
            done[s] += len(rows)
    assert (conv_SCJ[1] == 7).all(), "a slot that no sequence has"
    assert (memory_SHKV[1] == 7).all()
    return {s: torch.cat(rows) for s, rows in found.items()}


def by_transformers(case: Case, s: int) -> Tensor:
    """Returns a whole sequence's result [T, H, V]."""
    from transformers.models.mamba2 import modeling_mamba2 as mamba

    x = mamba.causal_conv1d_fn(case.x[s].T[None], case.weight_CK, case.bias_C, activation="silu")[0].T
    keys = case.groups * case.k_dim
    x, k, q = x.split((case.heads * case.v_dim, keys, keys), dim=1)
    out: Tensor = mamba.mamba2_chunk_scan(
        x.reshape(1, len(x), case.heads, case.v_dim),
        case.dt[s][None],
        -case.a_log_H.exp(),
        *(part.reshape(1, len(x), case.groups, case.k_dim) for part in (k, q)),
        chunk_size=16,
        D=case.d_H,
        dt_bias=case.dt_bias_H,
        dt_softplus=True,
        dt_limit=LIMITS,
    )
    return out[0]


def check_triton(dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes: Any) -> None:
    from lorafleet.kernels.recurrent.causal_conv_triton import causal_conv_triton
    from lorafleet.kernels.recurrent.gated_norm_triton import gated_norm_triton
    from lorafleet.kernels.recurrent.state_space_triton import state_space_triton

    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    case = Case.make(**sizes, dtype=dtype, device=device)
    wanted = in_steps(case, causal_conv_torch, state_space_torch)
    for s, out in in_steps(case, causal_conv_triton, state_space_triton).items():
        largest = wanted[s].abs().max().item()
        own = {"atol": EXACT * largest, "rtol": 0.0} if dtype is torch.float32 else close
        torch.testing.assert_close(out, wanted[s], **own)
    batch = RecurrentBatch.build([len(case.x[1])], [0], [True], device=case.x[1].device)
    plain = [
        conv(case.x[1], case.weight_CK, case.x[1].new_zeros(1, len(case.weight_CK), 3), batch, None, activates=False)
        for conv in (causal_conv_triton, causal_conv_torch)
    ]
    torch.testing.assert_close(*plain, **close)
    x_TGW = wanted[2].flatten(1).unflatten(1, (case.groups, -1)).contiguous()
    gate_TGW = torch.cat((x_TGW, x_TGW.flip(0)), dim=1)[:, case.groups :]
    weight_GW = torch.arange(1.0, 1 + x_TGW[0].numel(), device=device).view_as(x_TGW[0]).to(dtype) / 8
    for gates_first in (False, True):
        found = gated_norm_triton(x_TGW, gate_TGW, weight_GW, 1e-5, gates_first)
        torch.testing.assert_close(found, gated_norm_torch(x_TGW, gate_TGW, weight_GW, 1e-5, gates_first), **close)


def test_sequences_in_steps_give_what_transformers_gives_of_each_alone() -> None:
    case = Case.make()
    for s, out in in_steps(case, causal_conv, state_space).items():
        torch.testing.assert_close(out, by_transformers(case, s), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("gates_first", [False, True])
def test_the_norm_of_groups_is_that_of_transformers(gates_first: bool) -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    x, gate = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)).unbind()
    norm = FalconH1RMSNormGated(24, eps=1e-5, n_groups=3, norm_before_gate=not gates_first)
    torch.nn.init.normal_(norm.weight)
    weight_GW = norm.weight.detach().view(3, 8)
    found = gated_norm(x.view(5, 3, 8), gate.view(5, 3, 8), weight_GW, 1e-5, gates_first)
    torch.testing.assert_close(found.flatten(1), norm(x[None], gate[None])[0].detach())


def test_interpreted_kernels_give_what_their_twins_give() -> None:
    run_interpreted("""
        from tests.kernels.recurrent.test_state_space import FEW_TOKENS, check_triton

        for dtype in (torch.float32, torch.float16):  # the latter in chunks
            check_triton(dtype, steps=FEW_TOKENS)
        check_triton(steps=FEW_TOKENS[1:], groups=1, heads=2, k_dim=5, v_dim=70)
    """)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"groups": 2, "heads": 8, "k_dim": 128, "v_dim": 64},
        {"groups": 1, "heads": 4, "k_dim": 256, "v_dim": 64},
        {"groups": 1, "heads": 2, "k_dim": 5, "v_dim": 70},
    ],
)
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_kernels_give_what_their_twins_give(self, dtype: torch.dtype, sizes: dict[str, int]) -> None:
        check_triton(dtype, "cuda", **sizes)
