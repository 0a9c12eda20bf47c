"""The weighted sum of the chosen experts' outputs in a step with few pairs and adapters on down, in one launch. It
multiplies P by B of down itself, so the additions are never written. kernels/moe/moe_torch.py has the twin.

Idea: all pairs of a token have the token's slot, so a program that takes a token and a block of columns needs one
record. It reads its columns' rows of B for all experts of the token at once, and nothing waits for anything else. Two
tokens that chose the same expert read its B twice, so this is for few pairs (kernels/moe/moe_triton.py).

Memory: y is [N, D], B of down is [E, D, R], P is described in kernels/moe/expert_lora_triton.py.
"""

# T tokens · E experts · K experts a token · N = T * K pairs · D hidden size · R rank

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.expert_lora import StepExperts
from lorafleet.kernels.moe.expert_lora_triton import TRITON_DTYPES, b_of, block_of_ranks, rank_of, record_of
from lorafleet.kernels.moe.moe_combine_triton import check_summands, with_shared
from lorafleet.kernels.moe.moe_torch import SharedOutput

BLOCK_NUMBERS = 8192  # numbers of B that a program holds


@jit(do_not_specialize=["slot_ptr", "record_ptr", "num_pairs", "num_columns"])
def _adapted_combine_kernel(
    y_ptr: tl.tensor,
    p_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    record_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    size: tl.constexpr,
    per_token: tl.constexpr,
    num_splits: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    has_shared: tl.constexpr,
    has_gate: tl.constexpr,
    block_k: tl.constexpr,
    block_d: tl.constexpr,
    block_r: tl.constexpr,
    b_dtype: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block_d + tl.arange(0, block_d)
    inside = d < size
    k = tl.arange(0, block_k)
    there = k < per_token
    pair = token * per_token + k
    expert = tl.load(expert_ptr + pair, mask=there, other=0).to(tl.int64)
    record = record_of(slot_ptr, token, record_ptr)
    mask = there[:, None] & inside[None, :]
    y = tl.load(y_ptr + pair[:, None] * size + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_bias:
        y += tl.load(bias_ptr + expert[:, None] * size + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if record != 0:
        num_columns = num_columns // 16 * 16  # the same number, but the compiler knows that it is a multiple of 16
        split_stride = num_pairs.to(tl.int64) * num_columns
        rank = rank_of(record)
        b_row = b_of(record, b_dtype) + (expert[:, None] * size + d[None, :]) * rank
        for first in tl.range(0, rank, block_r):
            r = first + tl.arange(0, block_r)
            b = tl.load(
                b_row[:, :, None] + r[None, None, :], mask=mask[:, :, None] & (r < rank)[None, None, :], other=0.0
            )
            p_block = p_ptr + pair[:, None] * num_columns + r[None, :]
            p_mask = there[:, None] & (r < rank)[None, :]
            p = tl.load(p_block, mask=p_mask, other=0.0)
            for split in tl.static_range(1, num_splits):
                p += tl.load(p_block + split * split_stride, mask=p_mask, other=0.0)
            y += tl.sum(b.to(tl.float32) * p[:, None, :], 2)
    if has_weight:
        y *= tl.load(weight_ptr + pair, mask=there, other=0.0)[:, None]
    acc = tl.sum(y, 0)
    acc = with_shared(acc, shared_ptr, gate_ptr, token, d, inside, size, has_shared, has_gate)
    tl.store(out_ptr + token * size + d, acc.to(out_ptr.dtype.element_ty), mask=inside)


def combine_adapted(
    y_ND: Tensor,
    p_KNC: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor | None,
    bias_ED: Tensor | None,
    shared: SharedOutput | None,
    adapters: StepExperts,
) -> Tensor:
    """Returns the weighted sum of each token's pairs with their adapters' additions, [T, D] in y's dtype.

    p is shrink_experts() of down's input. Arguments that may be None are those of combine_triton.
    """
    shared_TD, gate_T1 = check_summands(y_ND, expert_TK, bias_ED, shared)
    (num_tokens, per_token), (num_pairs, size) = expert_TK.shape, y_ND.shape
    splits, _, num_columns = p_KNC.shape
    out_TD = torch.empty(num_tokens, size, dtype=y_ND.dtype, device=y_ND.device)
    block_k = triton.next_power_of_2(per_token)
    block_r = block_of_ranks(adapters)
    block_d = max(16, BLOCK_NUMBERS // (block_r * block_k))
    _adapted_combine_kernel[(num_tokens, triton.cdiv(size, block_d))](
        y_ND,
        p_KNC,
        expert_TK,
        weight_TK,
        bias_ED,
        shared_TD,
        gate_T1,
        adapters.slot_T,
        adapters.record_S,
        out_TD,
        num_pairs,
        num_columns,
        size=size,
        per_token=per_token,
        num_splits=splits,
        has_weight=weight_TK is not None,
        has_bias=bias_ED is not None,
        has_shared=shared is not None,
        has_gate=gate_T1 is not None,
        block_k=block_k,
        block_d=block_d,
        block_r=block_r,
        b_dtype=TRITON_DTYPES[adapters.dtype],
        num_warps=4,
    )
    return out_TD
