"""The two ends of a mixture of experts on the GPU: the router's choice, and the weighted sum of the chosen experts.
kernels/moe/moe_torch.py has their twins.

Idea: a token's logits fit into one warp's registers, so one program takes the largest logit K times; of equal ones it
takes the first. The sum adds a token's pairs in their order in float32 and rounds once. It needs no atomics, and every
run gives the same bits.
"""

# T tokens · E experts · K experts a token · N = T * K pairs · D hidden size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput

BLOCK_D = 512


@jit()
def _route_kernel(
    logits_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_experts: tl.constexpr,
    per_token: tl.constexpr,
    sums_to_one: tl.constexpr,
    block_e: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, block_e)
    k = tl.arange(0, block_k)
    logits = tl.load(logits_ptr + token * num_experts + e, mask=e < num_experts, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, 0)
    chosen = tl.zeros((block_k,), tl.int32)
    weights = tl.zeros((block_k,), tl.float32)
    left = tl.where(e < num_experts, tl.exp(logits - largest), -1.0)
    total = tl.sum(tl.where(e < num_experts, left, 0.0), 0)
    for i in tl.static_range(per_token):
        best = tl.argmax(left, 0)
        chosen = tl.where(k == i, best.to(tl.int32), chosen)
        weights = tl.where(k == i, tl.max(left, 0), weights)
        left = tl.where(e == best, -1.0, left)
    if sums_to_one:
        total = tl.sum(weights, 0)
    offsets = token * per_token + k
    tl.store(expert_ptr + offsets, chosen, mask=k < per_token)
    tl.store(weight_ptr + offsets, weights / total, mask=k < per_token)


def route_triton(logits_TE: Tensor, per_token: int, sums_to_one: bool) -> tuple[Tensor, Tensor]:
    assert logits_TE.is_contiguous()
    num_tokens, num_experts = logits_TE.shape
    expert_TK = torch.empty(num_tokens, per_token, dtype=torch.int32, device=logits_TE.device)
    weight_TK = torch.empty(num_tokens, per_token, dtype=torch.float32, device=logits_TE.device)
    _route_kernel[(num_tokens,)](
        logits_TE,
        expert_TK,
        weight_TK,
        num_experts=num_experts,
        per_token=per_token,
        sums_to_one=sums_to_one,
        block_e=triton.next_power_of_2(num_experts),
        block_k=triton.next_power_of_2(per_token),
        num_warps=1,
    )
    return expert_TK, weight_TK


@jit()
def _combine_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.constexpr,
    per_token: tl.constexpr,
    has_delta: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block_d + tl.arange(0, block_d)
    inside = d < size
    acc = tl.zeros((block_d,), tl.float32)
    for i in tl.static_range(per_token):
        pair = token * per_token + i
        y = tl.load(y_ptr + pair * size + d, mask=inside, other=0.0).to(tl.float32)
        if has_delta:
            y += tl.load(delta_ptr + pair * size + d, mask=inside, other=0.0).to(tl.float32)
        acc += tl.load(weight_ptr + pair) * y
    tl.store(out_ptr + token * size + d, acc.to(out_ptr.dtype.element_ty), mask=inside)


def combine_triton(y: LinearOutput, weight_TK: Tensor) -> Tensor:
    """Returns the weighted sum of each token's pairs, [T, D]. y is [N, D], without a scale or bias."""
    y.check()
    y_ND, delta_ND, affine = y
    num_tokens, per_token = weight_TK.shape
    num_pairs, size = y_ND.shape
    assert affine is None and num_pairs == num_tokens * per_token
    out_TD = torch.empty(num_tokens, size, dtype=y_ND.dtype, device=y_ND.device)
    _combine_kernel[(num_tokens, triton.cdiv(size, BLOCK_D))](
        y_ND,
        delta_ND,
        weight_TK,
        out_TD,
        size=size,
        per_token=per_token,
        has_delta=delta_ND is not None,
        block_d=BLOCK_D,
        num_warps=4,
    )
    return out_TD
