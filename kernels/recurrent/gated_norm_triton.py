"""The gated norm of a recurrent layer's heads in one launch. kernels/recurrent/gated_norm.py has its twin.

Idea: one program takes one head of one token.

Memory: x and the result are [T, H, V]. The gate's tokens may be apart, but its heads are side by side.
"""

# T tokens · H heads · V numbers of a head

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit


@jit()
def _gated_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    weight_stride: tl.tensor,  # 0 if all heads have the same weight
    size: tl.constexpr,
    eps: tl.constexpr,
    gates_first: tl.constexpr,
    block_v: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = (token * tl.num_programs(1) + head) * size
    v = tl.arange(0, block_v)
    inside = v < size
    x = tl.load(x_ptr + row + v, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + head * size + v, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + head * weight_stride + v, mask=inside, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if gates_first:
        x *= gate
    out = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * weight
    if not gates_first:
        out *= gate
    tl.store(out_ptr + row + v, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm_triton(
    x_THV: Tensor, gate_THV: Tensor, weight_HV: Tensor, eps: float, gates_first: bool = False
) -> Tensor:
    num_tokens, heads, size = x_THV.shape
    assert x_THV.is_contiguous() and gate_THV.shape == x_THV.shape and gate_THV.stride()[1:] == (size, 1)
    assert weight_HV.is_contiguous() and weight_HV.shape in ((size,), (heads, size))
    block_v = triton.next_power_of_2(size)
    out_THV = torch.empty_like(x_THV)
    _gated_norm_kernel[num_tokens, heads](
        x_THV,
        gate_THV,
        weight_HV,
        out_THV,
        gate_THV.stride(0),
        size if weight_HV.dim() == 2 else 0,
        size=size,
        eps=eps,
        gates_first=gates_first,
        block_v=block_v,
        num_warps=min(8, max(1, block_v // 512)),
    )
    return out_THV
