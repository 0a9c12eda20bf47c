"""The states that recurrent kernels keep behind single tokens are those of steps that end there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.recurrent.causal_conv import causal_conv, causal_conv_torch
from lorafleet.kernels.recurrent.delta_rule import HeadGates, delta_rule_torch, gated_delta_rule
from lorafleet.kernels.recurrent.recurrent_batch import NOT_KEPT, RecurrentBatch
from lorafleet.kernels.recurrent.state_space import HeadSteps, state_space, state_space_torch
from tests.kernels.harness import run_interpreted

# Tokens of each sequence, its slot and whether it is new. Behind the tokens of the first, third and fifth but the last,
# states are kept; the fourth is a prompt that is computed by chunks.
LENS = [4, 1, 3, 20, 2]
SLOTS = [2, 0, 5, 1, 4]
IS_NEW = [False, False, True, True, False]
KEPT = [9, 6, 7, NOT_KEPT, NOT_KEPT, 8, 10, NOT_KEPT, *[NOT_KEPT] * 20, 11, NOT_KEPT]
NUM_SLOTS, NOBODYS = 12, 3
HEADS, GROUPS, K_DIM, V_DIM = 4, 2, 8, 12
CHANNELS = 2 * GROUPS * K_DIM + HEADS * V_DIM
Run = Callable[[Tensor, Tensor, RecurrentBatch], Tensor]  # inputs [T, C] and states [S, ...] to results


def runs(conv: Any, delta: Any, space: Any, device: str) -> dict[str, tuple[Run, tuple[int, ...]]]:
    """Returns each kernel with random parameters, and the shape of its state."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    tokens = sum(LENS)
    weight_CK, bias_C = normal(CHANNELS, 4), normal(CHANNELS)
    gates = HeadGates(*(normal(tokens, HEADS) for _ in range(2)), *(normal(HEADS) for _ in range(2)))
    steps = HeadSteps(normal(tokens, HEADS), *(normal(HEADS) for _ in range(3)), (0.0, float("inf")))

    def of_gates(x_TC: Tensor, state_S: Tensor, batch: RecurrentBatch, rows: slice = slice(None)) -> Tensor:
        own = gates._replace(b_TH=gates.b_TH[rows].to(x_TC.dtype), a_TH=gates.a_TH[rows].to(x_TC.dtype))
        return delta(x_TC, own, state_S, GROUPS, batch)

    def of_steps(x_TC: Tensor, state_S: Tensor, batch: RecurrentBatch, rows: slice = slice(None)) -> Tensor:
        return space(x_TC, steps._replace(dt_TH=steps.dt_TH[rows].to(x_TC.dtype)), state_S, GROUPS, batch)

    def of_conv(x_TC: Tensor, state_S: Tensor, batch: RecurrentBatch, rows: slice = slice(None)) -> Tensor:  # noqa: ARG001
        return conv(x_TC, weight_CK.to(x_TC.dtype), state_S, batch, bias_C)

    memory = HEADS, K_DIM, V_DIM
    return {"conv": (of_conv, (CHANNELS, 3)), "delta": (of_gates, memory), "space": (of_steps, memory)}


def inputs(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    x_TC = torch.randn(sum(LENS), CHANNELS, generator=random).to(device, dtype)
    state_S = torch.randn(NUM_SLOTS, *shape, generator=random).to(device)
    return x_TC, state_S.to(dtype) if name == "conv" else state_S


def check_against_steps(device: str = "cpu") -> None:
    """Compares each kept state with that of a step which ends at its token."""
    for name, (run, shape) in runs(causal_conv, gated_delta_rule, state_space, device).items():
        x_TC, state_S = inputs(name, shape, torch.float32, device)
        before_S = state_S.clone()
        out_T = run(x_TC, state_S, RecurrentBatch.build(LENS, SLOTS, IS_NEW, torch.device(device), KEPT))
        assert torch.equal(state_S[NOBODYS], before_S[NOBODYS])
        start = 0
        for length, slot, is_new in zip(LENS, SLOTS, IS_NEW, strict=True):
            for row in range(start, start + length):
                if KEPT[row] == NOT_KEPT and row + 1 < start + length:
                    continue
                alone_S, span = before_S.clone(), slice(start, row + 1)
                batch = RecurrentBatch.build([row + 1 - start], [slot], [is_new], torch.device(device))
                partly = partial(run, rows=span)  # type: ignore[call-arg]  # all of them take it
                last_T = partly(x_TC[span], alone_S, batch)
                torch.testing.assert_close(out_T[row], last_T[-1], atol=2e-5, rtol=2e-5)
                kept = slot if KEPT[row] == NOT_KEPT else KEPT[row]
                torch.testing.assert_close(state_S[kept], alone_S[slot], atol=2e-5, rtol=2e-5)
            start += length


def check_triton(dtype: torch.dtype = torch.float32, device: str = "cpu", tolerance: float = 2e-5) -> None:
    from lorafleet.kernels.recurrent.causal_conv_triton import causal_conv_triton
    from lorafleet.kernels.recurrent.delta_rule_triton import delta_rule_triton
    from lorafleet.kernels.recurrent.state_space_triton import state_space_triton

    batch = RecurrentBatch.build(LENS, SLOTS, IS_NEW, torch.device(device), KEPT)
    ours = runs(causal_conv_triton, delta_rule_triton, state_space_triton, device)
    twins = runs(causal_conv_torch, delta_rule_torch, state_space_torch, device)
    for name, (run, shape) in ours.items():
        x_TC, state_S = inputs(name, shape, dtype, device)
        twin_S = state_S.clone()
        close = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(run(x_TC, state_S, batch), twins[name][0](x_TC, twin_S, batch), **close)
        torch.testing.assert_close(state_S, twin_S, **close)


def check_captured(device: str = "cpu", tolerance: float = 0.0) -> None:
    """Compares a batch for captured steps, which is filled twice, with one that is built for a step."""
    from lorafleet.kernels.recurrent.causal_conv_triton import causal_conv_triton
    from lorafleet.kernels.recurrent.delta_rule_triton import delta_rule_triton
    from lorafleet.kernels.recurrent.state_space_triton import state_space_triton

    lens, slots, is_new = [4, 1, 3], SLOTS[:3], IS_NEW[:3]
    kept, num_rows = KEPT[: sum(lens)], sum(lens)
    of_device = torch.device(device)
    exact = RecurrentBatch.build(lens, slots, is_new, of_device, kept)
    captured = RecurrentBatch.of_drafts(sum(LENS), 5, NOBODYS, of_device)
    captured.refill(LENS[:2], SLOTS[:2], IS_NEW[:2], NOBODYS, KEPT[: sum(LENS[:2])])
    captured.refill(lens, slots, is_new, NOBODYS, kept)
    for name, (run, shape) in runs(causal_conv_triton, delta_rule_triton, state_space_triton, device).items():
        x_TC, state_S = inputs(name, shape, torch.float32, device)
        exact_S = state_S.clone()
        found_T = run(x_TC, state_S, captured)
        some = partial(run, rows=slice(num_rows))  # type: ignore[call-arg]  # all of them take it
        close = {"atol": tolerance, "rtol": tolerance}
        torch.testing.assert_close(found_T[:num_rows], some(x_TC[:num_rows], exact_S, exact), **close)
        assert found_T.isfinite().all()
        others = [slot for slot in range(NUM_SLOTS) if slot != NOBODYS]
        torch.testing.assert_close(state_S[others], exact_S[others], **close)


def test_kept_states_are_those_of_steps_that_end_there() -> None:
    check_against_steps()


def test_interpreted_kernels_keep_what_their_twins_keep() -> None:
    run_interpreted("""
        import torch
        from tests.kernels.recurrent.test_kept_states import check_captured, check_triton

        check_captured()
        check_triton()
        check_triton(torch.float16, tolerance=2e-2)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_kept_states_are_those_of_steps_that_end_there(self) -> None:
        check_against_steps("cuda")
        check_captured("cuda", tolerance=1e-6)

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 6e-2)])
    def test_kernels_keep_what_their_twins_keep(self, dtype: torch.dtype, tolerance: float) -> None:
        check_triton(dtype, "cuda", tolerance)
