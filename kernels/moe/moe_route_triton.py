"""The router's choice on the GPU in one launch. kernels/moe/moe_torch.py has its twin.

Idea: a token's logits fit into one warp's registers, so one program takes the largest value K times; of equal ones it
takes the first. Groups of experts lie in rows of a square of registers, each padded to a power of two, so that the
values of groups are reductions along rows. Without groups there is one row.
"""

# T tokens · E experts · K experts a token

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.split_sums_triton import early_launch
from lorafleet.kernels.moe.moe_torch import SMALLEST_SUM
from lorafleet.kernels.moe.routing_rule import RoutingRule

NONE = tl.constexpr(float("-inf"))  # smaller than what any expert or group has


@jit()
def _best_groups(
    choice: tl.tensor,
    groups_per_token: tl.constexpr,
    by_top_two: tl.constexpr,
    block_g: tl.constexpr,
    block_x: tl.constexpr,
) -> tl.tensor:
    """Returns the values of the experts in the best groups, and -inf for the others."""
    choice = tl.reshape(choice, (block_g, block_x))
    g = tl.arange(0, block_g)
    value = tl.max(choice, 1)
    if by_top_two:
        first = tl.argmax(choice, 1)
        value += tl.max(tl.where(tl.arange(0, block_x)[None, :] == first[:, None], NONE, choice), 1)
    kept = tl.zeros((block_g,), tl.int32)
    for _ in tl.static_range(groups_per_token):
        best = tl.argmax(value, 0)
        kept = tl.where(g == best, 1, kept)
        value = tl.where(g == best, NONE, value)
    return tl.reshape(tl.where(kept[:, None] > 0, choice, NONE), (block_g * block_x,))


@jit()
def _route_kernel(
    logits_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
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
    weights_a_row: tl.constexpr,
    early: tl.constexpr,
    block_g: tl.constexpr,
    block_x: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    group_size: tl.constexpr = num_experts // groups
    place = tl.arange(0, block_g * block_x)
    e = place // block_x * group_size + place % block_x
    there = (place // block_x < groups) & (place % block_x < group_size)
    k = tl.arange(0, block_k)
    logits = tl.load(logits_ptr + token * num_experts + e, mask=there, other=float("-inf")).to(tl.float32)
    chosen = tl.zeros((block_k,), tl.int32)
    weights = tl.zeros((block_k,), tl.float32)
    if is_sigmoid:
        score = tl.sigmoid(logits)
        total = 1.0
        left = logits  # which still differ where their sigmoids are rounded to 1
        if has_correction or groups > 1:
            left = score
    elif is_sparsemixer:
        score = logits
        total = 1.0
        left = logits
    else:
        score = tl.exp(logits - tl.max(logits, 0))
        total = tl.sum(tl.where(there, score, 0.0), 0)
        left = score
        if has_correction:
            left = score / total
    if has_correction:
        left += tl.load(correction_ptr + e, mask=there, other=0.0)
    left = tl.where(there, left, NONE)
    if groups > 1:
        left = _best_groups(left, groups_per_token, by_top_two, block_g, block_x)
    for i in tl.static_range(per_token):
        best = tl.argmax(left, 0)
        chosen = tl.where(k == i, (best // block_x * group_size + best % block_x).to(tl.int32), chosen)
        if is_sparsemixer:
            largest = tl.max(left, 0)
            is_far = (largest - logits) / tl.maximum(tl.abs(logits), largest) > nearness
            weight = 1.0 / tl.sum(tl.where(is_far | (left == NONE), 0.0, tl.exp(left - largest)), 0)
        else:
            weight = tl.sum(tl.where(place == best, score, 0.0), 0)
        weights = tl.where(k == i, weight, weights)
        left = tl.where(place == best, NONE, left)
    if sums_to_one:
        total = tl.maximum(tl.sum(weights, 0), smallest_sum)
    weights = weights / total
    if scaling != 1.0:
        weights *= scaling
    chosen = tl.minimum(chosen, num_experts - 1)  # For NaN, argmax may return the padding behind the experts.
    if has_scale:
        weights *= tl.load(scale_ptr + chosen, mask=k < per_token, other=0.0)
    tl.store(expert_ptr + token * per_token + k, chosen, mask=k < per_token)
    tl.store(weight_ptr + token * weights_a_row + k, weights, mask=k < per_token)


def route_triton(
    logits_TE: Tensor,
    rule: RoutingRule,
    correction_E: Tensor | None = None,
    scale_E: Tensor | None = None,
    out_TK: Tensor | None = None,
    out_weight_TJ: Tensor | None = None,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns each token's experts, int32 [T, K], and their weights, float32 [T, K].

    Args:
        out_weight_TJ: Memory whose first columns receive the weights, and which is returned. None makes new memory.
        early: Whether the launch starts before the kernel ahead has ended (programmatic dependent launch).
    """
    assert logits_TE.is_contiguous()
    num_tokens, num_experts = logits_TE.shape
    for vector in (correction_E, scale_E):
        assert vector is None or (vector.shape == (num_experts,) and vector.dtype == torch.float32)
    groups = 1 if rule.groups is None else rule.groups.count
    expert_TK = out_TK
    if expert_TK is None:
        expert_TK = torch.empty(num_tokens, rule.per_token, dtype=torch.int32, device=logits_TE.device)
    assert expert_TK.shape == (num_tokens, rule.per_token) and expert_TK.is_contiguous()
    weight_TJ = out_weight_TJ
    if weight_TJ is None:
        weight_TJ = torch.empty(num_tokens, rule.per_token, dtype=torch.float32, device=logits_TE.device)
    assert weight_TJ.is_contiguous() and weight_TJ.shape[1] >= rule.per_token
    _route_kernel[(num_tokens,)](
        logits_TE,
        correction_E,
        scale_E,
        expert_TK,
        weight_TJ,
        num_experts=num_experts,
        per_token=rule.per_token,
        sums_to_one=rule.sums_to_one,
        is_sigmoid=rule.scores == "sigmoid",
        is_sparsemixer=rule.scores == "sparsemixer",
        nearness=rule.nearness,
        scaling=rule.scaling,
        has_correction=correction_E is not None,
        has_scale=scale_E is not None,
        groups=groups,
        groups_per_token=1 if rule.groups is None else rule.groups.per_token,
        by_top_two=rule.groups is not None and rule.groups.ranked_by == "top_two",
        smallest_sum=SMALLEST_SUM,
        weights_a_row=weight_TJ.shape[1],
        early=early,
        block_g=triton.next_power_of_2(groups),
        block_x=triton.next_power_of_2(num_experts // groups),
        block_k=triton.next_power_of_2(rule.per_token),
        num_warps=1,
        **early_launch(early),
    )
    return expert_TK, weight_TJ
