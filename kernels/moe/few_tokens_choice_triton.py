"""The router's logits, the shared expert's gate and the choice of few tokens in one launch.
kernels/moe/few_tokens.py has its twin.

Idea: a program computes some logits of all tokens, and the last one the shared expert's gate. The program that ends
last, whichever that is, reads the logits of all programs and chooses. One token needs no tensor cores: its program
multiplies rows of the router in registers.

Memory: x is [T, D], the router [E, D], the gate [1, D], the logits float32 [T, E]. The choice is int32 [T, K], and the
weights are float32 [T, J]: those of the chosen experts, and that of the shared expert behind them.
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
from lorafleet.kernels.moe.moe_route_triton import NONE, choose_experts, place_experts, rule_constants

# Rows of the router, inputs of a step and warps of a program, for one token and for more.
ONE_TOKEN_BLOCKS, BLOCKS = (2, 1024, 1), (16, 128, 4)
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


@jit(do_not_specialize=["num_tokens", "expert_ptr"])
def _choice_kernel(
    x_ptr: tl.tensor,
    router_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_tokens: tl.tensor,
    size: tl.constexpr,
    num_experts: tl.constexpr,
    per_token: tl.constexpr,
    sums_to_one: tl.constexpr,
    is_sigmoid: tl.constexpr,
    is_sparsemixer: tl.constexpr,
    nearness: tl.constexpr,
    scaling: tl.constexpr,
    has_correction: tl.constexpr,
    has_scale: tl.constexpr,
    groups: tl.constexpr,
    groups_per_token: tl.constexpr,
    by_top_two: tl.constexpr,
    smallest_sum: tl.constexpr,
    has_shared: tl.constexpr,
    has_gate: tl.constexpr,
    early: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
    block_t: tl.constexpr,
    block_g: tl.constexpr,
    block_x: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
        gdc_wait()
    summands: tl.constexpr = per_token + 1 if has_shared else per_token
    t = tl.arange(0, block_t)
    t_inside = t < num_tokens
    r = tl.program_id(0) * block_r + tl.arange(0, block_r)
    if tl.program_id(0) * block_r < num_experts:
        logits = rows_of_x(x_ptr, t, t_inside, router_ptr, r, r < num_experts, size, block_d, stages)
        logits = logits.to(router_ptr.dtype.element_ty).to(tl.float32)  # as a linear alone rounds them
        place = logits_ptr + t[None, :] * num_experts + r[:, None]
        tl.store(place, logits, mask=(r < num_experts)[:, None] & t_inside[None, :])
    else:
        first = tl.arange(0, block_r)
        gate = rows_of_x(x_ptr, t, t_inside, gate_ptr, first, first < 1, size, block_d, stages)
        gate = tl.sigmoid(gate.to(gate_ptr.dtype.element_ty).to(tl.float32))
        place = weight_ptr + t[None, :] * summands + per_token + first[:, None]
        tl.store(place, gate, mask=(first < 1)[:, None] & t_inside[None, :])
    tl.debug_barrier()  # all threads have stored before one of them counts
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        e, there = place_experts(num_experts, groups, block_g, block_x)
        # Other multiprocessors wrote the logits: they are in the L2 cache, and not in this one's.
        logits = tl.load(
            logits_ptr + t[:, None] * num_experts + e[None, :],
            mask=t_inside[:, None] & there[None, :],
            other=NONE,
            cache_modifier=".cg",
        )
        chosen, weights = choose_experts(
            logits, correction_ptr, scale_ptr, num_experts, per_token, sums_to_one, is_sigmoid, is_sparsemixer,
            nearness, scaling, has_correction, has_scale, groups, groups_per_token, by_top_two, smallest_sum, block_t,
            block_g, block_x, block_k,
        )  # fmt: skip
        k = tl.arange(0, block_k)[None, :]
        inside = t_inside[:, None] & (k < per_token)
        tl.store(expert_ptr + t[:, None] * per_token + k, chosen, mask=inside)
        tl.store(weight_ptr + t[:, None] * summands + k, weights, mask=inside)
        if has_shared and not has_gate:
            tl.store(weight_ptr + t * summands + per_token, 1.0, mask=t_inside)


def few_token_choice_triton(
    x_TD: Tensor, router: FewTokenRouter, shared: SharedWeights | None, out_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns each token's experts, int32 [T, K], and the weights of all that is summed, float32 [T, J]."""
    (num_tokens, size), num_experts = x_TD.shape, len(router.router_ED)
    rule, device, gate_1D = router.rule, x_TD.device, None if shared is None else shared.gate_1D
    for weight in (router.router_ED, gate_1D):
        assert weight is None or (weight.is_contiguous() and weight.shape[1] == size)
    expert_TK = out_TK
    if expert_TK is None:
        expert_TK = torch.empty(num_tokens, rule.per_token, dtype=torch.int32, device=device)
    assert expert_TK.shape == (num_tokens, rule.per_token) and expert_TK.is_contiguous() and x_TD.is_contiguous()
    summands = rule.per_token + (shared is not None)
    weight_TJ = torch.empty(num_tokens, summands, dtype=torch.float32, device=device)
    logits_TE = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=device)
    block_r, block_d, warps = ONE_TOKEN_BLOCKS if num_tokens == 1 else BLOCKS
    _choice_kernel[(triton.cdiv(num_experts, block_r) + (gate_1D is not None),)](
        x_TD,
        router.router_ED,
        gate_1D,
        router.correction_E,
        router.scale_E,
        logits_TE,
        router.arrived_1,
        expert_TK,
        weight_TJ,
        num_tokens,
        size=size,
        **rule_constants(rule, num_experts, router.correction_E is not None, router.scale_E is not None),
        has_shared=shared is not None,
        has_gate=gate_1D is not None,
        early=router.early,
        block_r=block_r,
        block_d=block_d if router.router_ED.dtype.itemsize == 2 else block_d // 2,
        block_t=token_rows(num_tokens),
        stages=STAGES,
        num_warps=warps,
        **early_launch(router.early),
    )
    return expert_TK, weight_TJ


def token_rows(num_tokens: int) -> int:
    """Returns the rows for tokens in a program: 1, or the smallest number of tensor cores."""
    return 1 if num_tokens == 1 else 16
