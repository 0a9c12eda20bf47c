"""The rotation of some numbers of each query head in one launch. kernels/decoder/rotate_queries.py has its twin.

Idea: a program takes one token and some of its heads, and holds the two numbers of each pair in registers. The
arithmetic is fp32 and rounds once.

Memory: q and out are [T, H, 2 F] with any strides of tokens and heads. cos and sin are [T, F].
"""

# T tokens · H query heads · F rotated pairs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_HEADS = 16


@jit()
def _rotate_kernel(
    q_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    heads: tl.constexpr,
    pairs: tl.constexpr,
    is_interleaved: tl.constexpr,
    block_h: tl.constexpr,
    block_f: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_h + tl.arange(0, block_h)
    f = tl.arange(0, block_f)
    is_pair = f < pairs
    mask = (head < heads)[:, None] & is_pair[None, :]
    low = f
    high = f + pairs
    if is_interleaved:
        low = 2 * f
        high = low + 1
    row = q_ptr + token * q_stride + (head * q_head_stride)[:, None]
    first = tl.load(row + low[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + high[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * pairs + f, mask=is_pair, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * pairs + f, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    out_row = out_ptr + token * out_stride + (head * out_head_stride)[:, None]
    tl.store(out_row + low[None, :], (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_row + high[None, :], (second * cos + first * sin).to(dtype), mask=mask)


def rotate_queries_triton(
    q_THR: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, is_interleaved: bool, out_THR: Tensor
) -> None:
    """Computes rotate_queries, which has checked the shapes."""
    assert q_THR.stride(2) == out_THR.stride(2) == 1
    assert cos_T1F.is_contiguous() and sin_T1F.is_contiguous()
    num_tokens, heads, width = q_THR.shape
    _rotate_kernel[(num_tokens, triton.cdiv(heads, BLOCK_HEADS))](
        q_THR,
        cos_T1F,
        sin_T1F,
        out_THR,
        *q_THR.stride()[:2],
        *out_THR.stride()[:2],
        heads=heads,
        pairs=width // 2,
        is_interleaved=is_interleaved,
        block_h=BLOCK_HEADS,
        block_f=max(1, triton.next_power_of_2(width // 2)),
        num_warps=4,
    )
