"""The experts of few tokens in two launches: gate and up with the activation, then down times the experts' weights.
kernels/moe/few_tokens.py has the twin.

Idea: a program takes one expert of one token, and a block of its outputs. A token chooses an expert once, so all tokens
that chose the same one fit into the rows of a program. The program of the first such token computes them all, and
those of the others end at once; nothing is sorted. More programs compute the shared expert for all tokens. W is the
first operand of the tensor cores, since its rows are many. One token needs no tensor cores.

Memory: x is [T, D], gate_up [E, 2I, D], where an expert's rows are gate, then up, and down [E, D, I]. Between the
launches lie [K, T, I] numbers of the chosen experts and [T, I] of the shared one, in x's dtype. The sums are float32
[J, T, D], one for each of a token's experts, in the order of its choice, then the shared one's.
"""

# T tokens · E experts · K experts a token · J = K, or K + 1 with a shared expert · D hidden size
# I intermediate size

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.split_sums_triton import early_launch
from lorafleet.kernels.lora.linear_output import LinearOutput, SplitSums
from lorafleet.kernels.moe.expert_activation import is_gated
from lorafleet.kernels.moe.expert_activation_triton import activation_of, formula_of
from lorafleet.kernels.moe.few_tokens import FewTokenMixture
from lorafleet.kernels.moe.few_tokens_choice_triton import few_token_choice_triton, rows_of_x, token_rows


@dataclass(frozen=True, slots=True)
class Blocks:
    """The shape of a launch's programs."""

    outputs: int  # outputs of a program; of gate and of up each
    inputs: int  # inputs of a step, in half precision
    warps: int = 4
    stages: int = 4

    def step(self, dtype: torch.dtype) -> int:
        """Returns the inputs of a step."""
        return self.inputs if dtype.itemsize == 2 else self.inputs // 2


# Gate and up, then down: for one token, and for more.
ONE_TOKEN = Blocks(4, 1024), Blocks(8, 512)
SOME_TOKENS = Blocks(32, 128), Blocks(64, 128)


@jit()
def _sharers(
    expert_ptr: tl.tensor,
    pair: tl.tensor,
    num_tokens: tl.tensor,
    per_token: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the pair's expert, whether it is the first pair that has it, which tokens chose it, and as which of their
    experts each of them did."""
    expert = tl.load(expert_ptr + pair)
    t, k = tl.arange(0, block_t), tl.arange(0, block_k)
    inside = (t < num_tokens)[:, None] & (k < per_token)[None, :]
    chosen = tl.load(expert_ptr + t[:, None] * per_token + k[None, :], mask=inside, other=-1)
    is_own = (chosen == expert).to(tl.int32)
    shares = tl.max(is_own, 1)
    is_first = tl.max(tl.where(t < pair // per_token, shares, 0), 0) == 0
    # A token of NaN has an expert several times. Any of its own places serves then.
    return expert.to(tl.int64), is_first, shares > 0, tl.max(is_own * k[None, :], 1)


@jit()
def _activated(
    x_ptr: tl.tensor,
    t: tl.tensor,
    t_inside: tl.tensor,
    w_ptr: tl.tensor,
    o: tl.tensor,
    outputs: tl.constexpr,
    size: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    formula: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """Returns the activation of the outputs o, [o, t]. The first rows of W are those of gate, and then those of up."""
    inside = o < outputs
    block_o: tl.constexpr = o.shape[0]
    block_t: tl.constexpr = t.shape[0]
    d = tl.arange(0, block_d)
    gate_tile = w_ptr + o.to(tl.int64)[:, None] * size + d[None, :]
    up_tile = gate_tile + outputs * size
    if block_t == 1:
        gates = tl.zeros((block_o, block_d), tl.float32)
        ups = tl.zeros((block_o, block_d), tl.float32)
        x_tile = x_ptr + t.to(tl.int64)[:, None] * size + d[None, :]
        for first in tl.range(0, size, block_d):
            there = inside[:, None] & (first + d < size)[None, :]
            gate = tl.load(gate_tile + first, mask=there, other=0.0)
            up = tl.load(up_tile + first, mask=there, other=0.0)
            x = tl.load(x_tile + first, mask=(first + d < size)[None, :], other=0.0).to(tl.float32)
            gates += gate.to(tl.float32) * x
            ups += up.to(tl.float32) * x
        gate = tl.sum(gates, 1)[:, None]
        up = tl.sum(ups, 1)[:, None]
    else:
        gate = tl.zeros((block_o, block_t), tl.float32)
        up = tl.zeros((block_o, block_t), tl.float32)
        x_tile = x_ptr + t.to(tl.int64)[None, :] * size + d[:, None]
        for first in tl.range(0, size, block_d, num_stages=stages):
            d_inside = first + d < size
            there = inside[:, None] & d_inside[None, :]
            x = tl.load(x_tile + first, mask=t_inside[None, :] & d_inside[:, None], other=0.0)
            gate = tl.dot(tl.load(gate_tile + first, mask=there, other=0.0), x, gate, input_precision="ieee")
            up = tl.dot(tl.load(up_tile + first, mask=there, other=0.0), x, up, input_precision="ieee")
    return activation_of(gate, up, alpha, limit, formula)


@jit(do_not_specialize=["num_tokens", "expert_ptr"])
def _inner_kernel(
    x_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    out_ptr: tl.tensor,
    shared_out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    size: tl.constexpr,
    inner: tl.constexpr,
    shared_inner: tl.constexpr,
    per_token: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    formula: tl.constexpr,
    early: tl.constexpr,
    block_o: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
        gdc_wait()
    shared_blocks: tl.constexpr = (shared_inner + block_o - 1) // block_o
    blocks: tl.constexpr = (inner + block_o - 1) // block_o
    t = tl.arange(0, block_t)
    program = tl.program_id(0)
    if program < shared_blocks:
        o, t_inside = program * block_o + tl.arange(0, block_o), t < num_tokens
        out = _activated(x_ptr, t, t_inside, shared_ptr, o, shared_inner, size, alpha, limit, formula, block_d, stages)
        place = shared_out_ptr + t[None, :] * shared_inner + o[:, None]
        mask = (o < shared_inner)[:, None] & t_inside[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        pair = (program - shared_blocks) // blocks
        o = (program - shared_blocks) % blocks * block_o + tl.arange(0, block_o)
        expert, is_first, shares, k = _sharers(expert_ptr, pair, num_tokens, per_token, block_t, block_k)
        if is_first:
            w_ptr = gate_up_ptr + expert * (2 * inner * size)
            out = _activated(x_ptr, t, shares, w_ptr, o, inner, size, alpha, limit, formula, block_d, stages)
            place = out_ptr + (k * num_tokens + t)[None, :] * inner + o[:, None]
            mask = (o < inner)[:, None] & shares[None, :]
            tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_tokens", "expert_ptr"])
def _outer_kernel(
    inner_ptr: tl.tensor,
    shared_inner_ptr: tl.tensor,
    down_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    part_ptr: tl.tensor,
    num_tokens: tl.tensor,
    size: tl.constexpr,
    inner: tl.constexpr,
    shared_inner: tl.constexpr,
    per_token: tl.constexpr,
    has_shared: tl.constexpr,
    early: tl.constexpr,
    block_o: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
        gdc_wait()
    summands: tl.constexpr = per_token + 1 if has_shared else per_token
    blocks: tl.constexpr = (size + block_o - 1) // block_o
    shared_blocks: tl.constexpr = blocks if has_shared else 0
    t = tl.arange(0, block_t)
    program = tl.program_id(0)
    o = program % blocks * block_o + tl.arange(0, block_o)
    if program < shared_blocks:
        shares = t < num_tokens
        out = rows_of_x(shared_inner_ptr, t, shares, shared_ptr, o, o < size, shared_inner, block_d, stages)
        weight = tl.load(weight_ptr + t * summands + per_token, mask=shares, other=0.0)
        place = part_ptr + (per_token * num_tokens + t).to(tl.int64)[None, :] * size + o[:, None]
        tl.store(place, out * weight[None, :], mask=(o < size)[:, None] & shares[None, :])
    else:
        pair = (program - shared_blocks) // blocks
        expert, is_first, shares, k = _sharers(expert_ptr, pair, num_tokens, per_token, block_t, block_k)
        if is_first:
            row = k * num_tokens + t
            w_ptr = down_ptr + expert * (size * inner)
            out = rows_of_x(inner_ptr, row, shares, w_ptr, o, o < size, inner, block_d, stages)
            weight = tl.load(weight_ptr + t * summands + k, mask=shares, other=0.0)
            place = part_ptr + row.to(tl.int64)[None, :] * size + o[:, None]
            tl.store(place, out * weight[None, :], mask=(o < size)[:, None] & shares[None, :])


def few_token_mixture_triton(x_TD: Tensor, mixture: FewTokenMixture, out_TK: Tensor | None) -> LinearOutput:
    gate_up_EUD, down_EDI, shared, early = mixture.gate_up_EUD, mixture.down_EDI, mixture.shared, mixture.router.early
    assert isinstance(gate_up_EUD, Tensor) and isinstance(down_EDI, Tensor)
    (num_tokens, size), inner, per_token = x_TD.shape, down_EDI.shape[2], mixture.router.rule.per_token
    assert is_gated(mixture.activation) and gate_up_EUD.shape[1:] == (2 * inner, size) and down_EDI.shape[1] == size
    assert gate_up_EUD.is_contiguous() and down_EDI.is_contiguous() and x_TD.dtype == gate_up_EUD.dtype
    # Without a shared expert its programs are compiled but not launched, so they need any weights.
    shared_gate_up_UD, shared_down_DI, shared_inner = gate_up_EUD, down_EDI, 0
    if shared is not None:
        assert isinstance(shared.gate_up_UD, Tensor) and isinstance(shared.down_DI, Tensor)
        shared_gate_up_UD, shared_down_DI, shared_inner = shared.gate_up_UD, shared.down_DI, shared.down_DI.shape[1]
        assert shared_gate_up_UD.shape == (2 * shared_inner, size) and shared_gate_up_UD.is_contiguous()
        assert shared_down_DI.shape == (size, shared_inner) and shared_down_DI.is_contiguous()
    expert_TK, weight_TJ = few_token_choice_triton(x_TD, mixture.router, shared, out_TK)
    rows = token_rows(num_tokens)
    of_inner, of_outer = ONE_TOKEN if rows == 1 else SOME_TOKENS
    sizes = {
        "size": size,
        "inner": inner,
        "shared_inner": shared_inner,
        "per_token": per_token,
        "early": early,
        "block_t": rows,
        "block_k": triton.next_power_of_2(per_token),
    }
    inner_NI = x_TD.new_empty(num_tokens * per_token, inner)
    shared_TI = x_TD.new_empty(num_tokens, shared_inner)
    pairs = num_tokens * per_token
    blocks = triton.cdiv(shared_inner, of_inner.outputs) + pairs * triton.cdiv(inner, of_inner.outputs)
    _inner_kernel[(blocks,)](
        *(x_TD, gate_up_EUD, shared_gate_up_UD, expert_TK, inner_NI, shared_TI, num_tokens),
        **sizes,
        **formula_of(mixture.activation),
        **_shape(of_inner, x_TD.dtype),
        **early_launch(early),
    )
    part_JTD = torch.empty(mixture.num_summands, num_tokens, size, dtype=torch.float32, device=x_TD.device)
    blocks = (pairs + (shared is not None)) * triton.cdiv(size, of_outer.outputs)
    _outer_kernel[(blocks,)](
        *(inner_NI, shared_TI, down_EDI, shared_down_DI, expert_TK, weight_TJ, part_JTD),
        num_tokens,
        **sizes,
        has_shared=shared is not None,
        **_shape(of_outer, x_TD.dtype),
        **early_launch(early),
    )
    return LinearOutput(torch.empty_like(x_TD), sums=SplitSums(part_JTD, early))


def _shape(blocks: Blocks, dtype: torch.dtype) -> dict[str, int]:
    return {
        "block_o": blocks.outputs,
        "block_d": blocks.step(dtype),
        "stages": blocks.stages,
        "num_warps": blocks.warps,
    }
