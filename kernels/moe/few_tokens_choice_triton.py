"""The router's logits and the shared expert's gate in one launch, and the choice of few tokens in a second one.
kernels/moe/few_tokens.py has the twin.

Idea: a program computes some logits of all tokens, and the last one the shared expert's gate. One token needs no
tensor cores: its program multiplies a row of the router in registers. The choice is that of moe_route_triton.py. If it
starts early, its launch costs nothing.

Memory: x is [T, D], the router [E, D], the gate [1, D], the logits [T, E] in the router's dtype. The choice is int32
[T, K], and the weights are float32 [T, J]: those of the chosen experts, and that of the shared expert behind them.
"""

# T tokens · E experts · K experts a token · J = K, or K + 1 with a shared expert · D hidden size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.split_sums_triton import early_launch
from lorafleet.kernels.moe.few_tokens import FewTokenRouter, SharedWeights
from lorafleet.kernels.moe.moe_route_triton import route_triton

# Rows of the router, inputs of a step and warps of a program, for one token and for more.
ONE_TOKEN_BLOCKS, BLOCKS = (1, 2048, 1), (16, 512, 4)
STAGES = 4


@jit()
def rows_of_x(
    x_ptr: tl.tensor,
    x_row: tl.tensor,
    x_inside: tl.tensor,
    w_ptr: tl.tensor,
    w_row: tl.tensor,
    w_inside: tl.tensor,
    size: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> tl.tensor:
    """Returns rows of W times rows of x, float32 [rows of W, rows of x]. x may have a shorter dtype than W."""
    block_w: tl.constexpr = w_row.shape[0]
    block_t: tl.constexpr = x_row.shape[0]
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    d = tl.arange(0, block_d)
    w_tile = w_ptr + w_row.to(tl.int64)[:, None] * size + d[None, :]
    if block_t == 1:
        x_tile = x_ptr + x_row.to(tl.int64)[:, None] * size + d[None, :]
        products = tl.zeros((block_w, block_d), tl.float32)
        for first in tl.range(0, size, block_d):
            d_inside = first + d < size
            w = tl.load(w_tile + first, mask=w_inside[:, None] & d_inside[None, :], other=0.0)
            x = tl.load(x_tile + first, mask=x_inside[:, None] & d_inside[None, :], other=0.0)
            products += w.to(tl.float32) * x.to(tl.float32)
        total = tl.sum(products, 1)[:, None]
    else:
        x_tile = x_ptr + x_row.to(tl.int64)[None, :] * size + d[:, None]
        total = tl.zeros((block_w, block_t), tl.float32)
        for first in tl.range(0, size, block_d, num_stages=stages):
            d_inside = first + d < size
            w = tl.load(w_tile + first, mask=w_inside[:, None] & d_inside[None, :], other=0.0)
            x = tl.load(x_tile + first, mask=x_inside[None, :] & d_inside[:, None], other=0.0)
            total = tl.dot(w, x.to(dtype), total, input_precision="ieee")
    return total


@jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x_ptr: tl.tensor,
    router_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_tokens: tl.tensor,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    weights_a_row: tl.constexpr,
    has_shared: tl.constexpr,
    has_gate: tl.constexpr,
    early: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.arange(0, block_t)
    t_inside = t < num_tokens
    r = tl.program_id(0) * block_r + tl.arange(0, block_r)
    if tl.program_id(0) * block_r < num_experts:
        logits = rows_of_x(x_ptr, t, t_inside, router_ptr, r, r < num_experts, size, block_d, stages)
        logit_place = logits_ptr + t[None, :] * num_experts + r[:, None]
        mask = (r < num_experts)[:, None] & t_inside[None, :]
        tl.store(logit_place, logits.to(logits_ptr.dtype.element_ty), mask=mask)
    elif has_shared:
        weight_place = weight_ptr + t * weights_a_row + weights_a_row - 1
        if has_gate:
            first = tl.arange(0, block_r)
            gates = rows_of_x(x_ptr, t, t_inside, gate_ptr, first, first < 1, size, block_d, stages)
            gate = tl.sum(gates, 0)  # Only the first row is not zero.
            tl.store(weight_place, tl.sigmoid(gate.to(gate_ptr.dtype.element_ty).to(tl.float32)), mask=t_inside)
        else:
            tl.store(weight_place, 1.0, mask=t_inside)


def few_token_choice_triton(
    x_TD: Tensor, router: FewTokenRouter, shared: SharedWeights | None, out_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns each token's experts, int32 [T, K], and the weights of all that is summed, float32 [T, J]."""
    (num_tokens, size), num_experts = x_TD.shape, len(router.router_ED)
    early, gate_1D = router.early, None if shared is None else shared.gate_1D
    for weight in (router.router_ED, gate_1D):
        assert weight is None or (weight.is_contiguous() and weight.shape[1] == size)
    assert x_TD.is_contiguous()
    summands = router.rule.per_token + (shared is not None)
    weight_TJ = torch.empty(num_tokens, summands, dtype=torch.float32, device=x_TD.device)
    logits_TE = torch.empty(num_tokens, num_experts, dtype=router.router_ED.dtype, device=x_TD.device)
    block_r, block_d, warps = ONE_TOKEN_BLOCKS if num_tokens == 1 else BLOCKS
    _logits_kernel[(triton.cdiv(num_experts, block_r) + (shared is not None),)](
        x_TD,
        router.router_ED,
        gate_1D,
        logits_TE,
        weight_TJ,
        num_tokens,
        size=size,
        num_experts=num_experts,
        weights_a_row=summands,
        has_shared=shared is not None,
        has_gate=gate_1D is not None,
        early=early,
        block_r=block_r,
        block_d=block_d if router.router_ED.dtype.itemsize == 2 else block_d // 2,
        block_t=token_rows(num_tokens),
        stages=STAGES,
        num_warps=warps,
        **early_launch(early),
    )
    return route_triton(logits_TE, router.rule, router.correction_E, router.scale_E, out_TK, weight_TJ, early)


def token_rows(num_tokens: int) -> int:
    """Returns the rows for tokens in a program: 1, or the smallest number of tensor cores."""
    return 1 if num_tokens == 1 else 16
