"""The router's choice on the GPU in one launch. kernels/moe/moe_torch.py has its twin.

Idea: a token's logits fit into one warp's registers, so one program takes the largest value K times; of equal ones it
takes the first. kernels/moe/few_tokens_choice_triton.py chooses for some tokens in one program. Groups of experts lie
in rows of a square of registers, each padded to a power of two, so that the values of groups are reductions along rows.
Without groups there is one row.
"""

# T tokens · E experts · K experts a token

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.moe_torch import SMALLEST_SUM
from lorafleet.kernels.moe.routing_rule import RoutingRule

NONE = tl.constexpr(float("-inf"))  # smaller than what any expert or group has


@jit()
def _best_groups(
    choice: tl.tensor,
    groups_per_token: tl.constexpr,
    by_top_two: tl.constexpr,
    block_t: tl.constexpr,
    block_g: tl.constexpr,
    block_x: tl.constexpr,
) -> tl.tensor:
    """Returns the values of the experts in the best groups, and -inf for the others."""
    choice = tl.reshape(choice, (block_t, block_g, block_x))
    g = tl.arange(0, block_g)[None, :]
    value = tl.max(choice, 2)
    if by_top_two:
        first = tl.argmax(choice, 2)
        value += tl.max(tl.where(tl.arange(0, block_x)[None, None, :] == first[:, :, None], NONE, choice), 2)
    kept = tl.zeros((block_t, block_g), tl.int32)
    for _ in tl.static_range(groups_per_token):
        best = tl.argmax(value, 1)[:, None]
        kept = tl.where(g == best, 1, kept)
        value = tl.where(g == best, NONE, value)
    return tl.reshape(tl.where(kept[:, :, None] > 0, choice, NONE), (block_t, block_g * block_x))


@jit()
def place_experts(
    num_experts: tl.constexpr, groups: tl.constexpr, block_g: tl.constexpr, block_x: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the expert of each register of a token, and whether there is one."""
    group_size: tl.constexpr = num_experts // groups
    place = tl.arange(0, block_g * block_x)
    expert = place // block_x * group_size + place % block_x
    return expert, (place // block_x < groups) & (place % block_x < group_size)


@jit()
def choose_experts(
    logits: tl.tensor,
    correction_ptr: tl.tensor,
    scale_ptr: tl.tensor,
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
    block_t: tl.constexpr,
    block_g: tl.constexpr,
    block_x: tl.constexpr,
    block_k: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the experts of block_t tokens and their weights, [block_t, block_k].

    The logits [block_t, block_g * block_x] are float32, in the places of place_experts(), and -inf where no expert is.
    """
    group_size: tl.constexpr = num_experts // groups
    e, there = place_experts(num_experts, groups, block_g, block_x)
    e, there = e[None, :], there[None, :]
    place = tl.arange(0, block_g * block_x)[None, :]
    k = tl.arange(0, block_k)[None, :]
    chosen = tl.zeros((block_t, block_k), tl.int32)
    weights = tl.zeros((block_t, block_k), tl.float32)
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
        score = tl.exp(logits - tl.max(logits, 1)[:, None])
        total = tl.sum(tl.where(there, score, 0.0), 1)[:, None]
        left = score
        if has_correction:
            left = score / total
    if has_correction:
        left += tl.load(correction_ptr + e, mask=there, other=0.0)
    left = tl.where(there, left, NONE)
    if groups > 1:
        left = _best_groups(left, groups_per_token, by_top_two, block_t, block_g, block_x)
    for i in tl.static_range(per_token):
        largest, best = tl.max(left, 1, return_indices=True)
        largest, best = largest[:, None], best[:, None]
        chosen = tl.where(k == i, (best // block_x * group_size + best % block_x).to(tl.int32), chosen)
        if is_sparsemixer:
            is_far = (largest - logits) / tl.maximum(tl.abs(logits), largest) > nearness
            weight = 1.0 / tl.sum(tl.where(is_far | (left == NONE), 0.0, tl.exp(left - largest)), 1)[:, None]
        elif has_correction:
            weight = tl.sum(tl.where(place == best, score, 0.0), 1)[:, None]
        elif is_sigmoid and groups == 1:
            weight = tl.sigmoid(largest)
        else:
            weight = largest
        weights = tl.where(k == i, weight, weights)
        left = tl.where(place == best, NONE, left)
    if sums_to_one:
        total = tl.maximum(tl.sum(weights, 1), smallest_sum)[:, None]
    weights = weights / total
    if scaling != 1.0:
        weights *= scaling
    if has_scale:
        weights *= tl.load(scale_ptr + chosen, mask=k < per_token, other=0.0)
    return chosen, weights


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
    block_g: tl.constexpr,
    block_x: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    e, there = place_experts(num_experts, groups, block_g, block_x)
    logits = tl.load(logits_ptr + token * num_experts + e, mask=there, other=float("-inf")).to(tl.float32)
    chosen, weights = choose_experts(
        logits[None, :], correction_ptr, scale_ptr, num_experts, per_token, sums_to_one, is_sigmoid, is_sparsemixer,
        nearness, scaling, has_correction, has_scale, groups, groups_per_token, by_top_two, smallest_sum, 1, block_g,
        block_x, block_k,
    )  # fmt: skip
    k = tl.arange(0, block_k)[None, :]
    offsets = token * per_token + k
    tl.store(expert_ptr + offsets, chosen, mask=k < per_token)
    tl.store(weight_ptr + offsets, weights, mask=k < per_token)


def rule_constants(rule: RoutingRule, num_experts: int, has_correction: bool, has_scale: bool) -> dict[str, Any]:
    """Returns the constants of choose_experts but block_t, by their names."""
    groups = 1 if rule.groups is None else rule.groups.count
    return {
        "num_experts": num_experts,
        "per_token": rule.per_token,
        "sums_to_one": rule.sums_to_one,
        "is_sigmoid": rule.scores == "sigmoid",
        "is_sparsemixer": rule.scores == "sparsemixer",
        "nearness": rule.nearness,
        "scaling": rule.scaling,
        "has_correction": has_correction,
        "has_scale": has_scale,
        "groups": groups,
        "groups_per_token": 1 if rule.groups is None else rule.groups.per_token,
        "by_top_two": rule.groups is not None and rule.groups.ranked_by == "top_two",
        "smallest_sum": SMALLEST_SUM,
        "block_g": triton.next_power_of_2(groups),
        "block_x": triton.next_power_of_2(num_experts // groups),
        "block_k": triton.next_power_of_2(rule.per_token),
    }


def route_triton(
    logits_TE: Tensor,
    rule: RoutingRule,
    correction_E: Tensor | None = None,
    scale_E: Tensor | None = None,
    out_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert logits_TE.is_contiguous()
    num_tokens, num_experts = logits_TE.shape
    for vector in (correction_E, scale_E):
        assert vector is None or (vector.shape == (num_experts,) and vector.dtype == torch.float32)
    expert_TK = out_TK
    if expert_TK is None:
        expert_TK = torch.empty(num_tokens, rule.per_token, dtype=torch.int32, device=logits_TE.device)
    assert expert_TK.shape == (num_tokens, rule.per_token) and expert_TK.is_contiguous()
    weight_TK = torch.empty(num_tokens, rule.per_token, dtype=torch.float32, device=logits_TE.device)
    _route_kernel[(num_tokens,)](
        logits_TE,
        correction_E,
        scale_E,
        expert_TK,
        weight_TK,
        **rule_constants(rule, num_experts, correction_E is not None, scale_E is not None),
        num_warps=1,
    )
    return expert_TK, weight_TK
