"""The gates of attention's results in one launch. kernels/decoder/head_gate.py has its twin.

Idea: elementwise. One program takes BLOCK of a token's numbers.

Memory: x and out are [T, H, P]. qgkv and the adapters' delta are [T, E], and qgkv may be in sums [K, T, E]. The gate of
head h is in the columns from (2 h + 1) P on.
"""

# T tokens · E all heads of q with their gates, k and v in one row · H query heads · P head size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.extras.affine_triton import scaled_and_shifted
from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.split_sums_triton import total
from lorafleet.kernels.lora.linear_output import LinearOutput

BLOCK = 1024


# Rows of the table of addresses begin anywhere: their alignment must not cause another compilation.
@jit(do_not_specialize=["affine_ptr"])
def _head_gate_kernel(
    x_ptr: tl.tensor,
    qgkv_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    has_delta: tl.constexpr,
    has_affine: tl.constexpr,
    num_sums: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block + tl.arange(0, block)
    inside = i < size
    column = (2 * (i // head_dim) + 1) * head_dim + i % head_dim
    gate = total(qgkv_ptr, token * width + column, inside, width, num_sums)
    if has_delta:
        gate += tl.load(delta_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    if has_affine:
        gate = scaled_and_shifted(gate, affine_ptr, token, tl.num_programs(0), column, inside)
    x = tl.load(x_ptr + token * size + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + i, (x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=inside)


def head_gate_triton(x_THP: Tensor, qgkv: LinearOutput) -> Tensor:
    qgkv.check(reads_sums=True)
    y_TE, delta_TE, affine_2T, _ = qgkv
    num_tokens, heads, head_dim = x_THP.shape
    size, width = heads * head_dim, y_TE.shape[1]
    assert x_THP.is_contiguous() and len(y_TE) == num_tokens and width >= 2 * size
    out_THP = torch.empty_like(x_THP)
    _head_gate_kernel[num_tokens, triton.cdiv(size, BLOCK)](
        x_THP,
        qgkv.read,
        delta_TE,
        affine_2T,
        out_THP,
        size=size,
        head_dim=head_dim,
        width=width,
        has_delta=delta_TE is not None,
        has_affine=affine_2T is not None,
        num_sums=qgkv.num_sums,
        block=BLOCK,
        num_warps=4,
    )
    return out_THP
