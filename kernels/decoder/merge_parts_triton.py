"""The merging of attention's parts in one launch. kernels/decoder/merge_parts.py has its twin.

Idea: one program takes some heads of one token and walks its parts. It holds the largest logarithm so far, the weights'
sum and the weighted sum of values, as an online softmax does, and rounds once.

Memory: out is [T, H, D] and parts [S, N, H, D], contiguous. The logarithms are [T, H] and [S, N, H], contiguous.
"""

# T tokens of the result · N tokens that have parts · S parts · H query heads · D numbers of a value

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_HEADS = 8


@jit(do_not_specialize=["num_parts", "part_logs"])
def _merge_kernel(
    out_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    part_ptr: tl.tensor,
    part_log_sum_ptr: tl.tensor,
    row_ptr: tl.tensor,
    num_parts: tl.tensor,
    part_logs: tl.tensor,
    heads: tl.constexpr,
    size: tl.constexpr,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + token).to(tl.int64)
    h = tl.program_id(1) * block_h + tl.arange(0, block_h)
    d = tl.arange(0, block_d)
    is_head = h < heads
    mask = is_head[:, None] & (d < size)[None, :]
    out = (row * heads + h)[:, None] * size + d[None, :]
    largest = tl.load(log_sum_ptr + row * heads + h, mask=is_head, other=0.0)
    total = tl.load(out_ptr + out, mask=mask, other=0.0).to(tl.float32)
    weights = tl.full((block_h,), 1.0, tl.float32)
    logs = token * heads + h
    for _ in range(num_parts):
        log_sum = tl.load(part_log_sum_ptr + logs, mask=is_head, other=0.0)
        values = tl.load(part_ptr + logs[:, None] * size + d[None, :], mask=mask, other=0.0).to(tl.float32)
        larger = tl.maximum(largest, log_sum)
        old, new = tl.exp2(largest - larger), tl.exp2(log_sum - larger)
        total = total * old[:, None] + values * new[:, None]
        weights = weights * old + new
        largest = larger
        logs += part_logs
    tl.store(out_ptr + out, (total / weights[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def merge_parts_triton(
    out_THD: Tensor, log_sum_TH: Tensor, part_SNHD: Tensor, part_log_sum_SNH: Tensor, row_N: Tensor
) -> None:
    """Computes merge_parts, which has checked the shapes."""
    for tensor in (out_THD, log_sum_TH, part_SNHD, part_log_sum_SNH):
        assert tensor.is_contiguous()
    num_parts, num_tokens, heads, size = part_SNHD.shape
    _merge_kernel[(num_tokens, triton.cdiv(heads, BLOCK_HEADS))](
        out_THD,
        log_sum_TH,
        part_SNHD,
        part_log_sum_SNH,
        row_N,
        num_parts,
        num_tokens * heads,
        heads=heads,
        size=size,
        block_h=BLOCK_HEADS,
        block_d=triton.next_power_of_2(size),
        num_warps=4,
    )
