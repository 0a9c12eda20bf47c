"""Linears whose rows have the same bits in every batch. kernels/linear/fixed_linear.py says why.

Idea: one program computes a tile of outputs from all inputs, which it walks in one order. Its tile is the same for one
row and for thousands, so the same instructions add the same products. Rows beyond the last are zeros. Groups of tiles
of rows share W in the L2 cache.

Memory: x is [T, D], W [O, D] and the result [T, O]. Source: Thinking Machines, "Defeating nondeterminism in LLM
inference", 2025.
"""

# T rows · D in · O out

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_T = 64  # rows of a tile: the smallest side of Hopper's matrix instructions
WIDE_OUTPUTS = 16384  # outputs from which wide tiles fill a GPU
GROUP_T = 8  # tiles of rows that share W's tiles


@jit(do_not_specialize=["num_rows"])
def _fixed_linear_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    block_t: tl.constexpr,
    block_o: tl.constexpr,
    block_d: tl.constexpr,
    group_t: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    tiles_t = tl.cdiv(num_rows, block_t)
    tiles_o: tl.constexpr = (outputs + block_o - 1) // block_o  # tl.cdiv makes no constant in Triton 3.6.
    program = tl.program_id(0)
    group = program // (group_t * tiles_o)
    group_size = tl.minimum(tiles_t - group * group_t, group_t)
    tile_t = group * group_t + program % (group_t * tiles_o) % group_size
    tile_o = program % (group_t * tiles_o) // group_size
    t = tile_t * block_t + tl.arange(0, block_t)
    o = tile_o * block_o + tl.arange(0, block_o)
    d = tl.arange(0, block_d)
    t_inside, o_inside = t < num_rows, o < outputs
    x_tile = x_ptr + t[:, None].to(tl.int64) * inputs + d[None, :]
    w_tile = w_ptr + o[None, :].to(tl.int64) * inputs + d[:, None]
    acc = tl.zeros((block_t, block_o), dtype=tl.float32)
    for first in tl.range(0, inputs, block_d, num_stages=stages):
        if inputs % block_d == 0:
            x = tl.load(x_tile + first, mask=t_inside[:, None], other=0.0)
            w = tl.load(w_tile + first, mask=o_inside[None, :], other=0.0)
        else:
            d_inside = first + d < inputs
            x = tl.load(x_tile + first, mask=t_inside[:, None] & d_inside[None, :], other=0.0)
            w = tl.load(w_tile + first, mask=o_inside[None, :] & d_inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + o, mask=o_inside, other=0.0).to(tl.float32)[None, :]
    y_tile = y_ptr + t[:, None].to(tl.int64) * outputs + o[None, :]
    tl.store(y_tile, acc.to(y_ptr.dtype.element_ty), mask=t_inside[:, None] & o_inside[None, :])


def fixed_linear_triton(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """Computes fixed_linear on CUDA, for any number of rows."""
    (num_rows, inputs), outputs = x_TD.shape, len(w_OD)
    assert w_OD.shape[1] == inputs and x_TD.is_contiguous() and w_OD.is_contiguous() and x_TD.dtype == w_OD.dtype
    assert bias_O is None or (bias_O.shape == (outputs,) and bias_O.is_contiguous())
    y_TO = torch.empty(num_rows, outputs, dtype=x_TD.dtype, device=x_TD.device)
    # tl.dot in float32 holds its operands in registers: larger tiles spill.
    block_t, block_o, block_d, stages = BLOCK_T, 128 if outputs >= WIDE_OUTPUTS else 64, 64, 4
    if x_TD.dtype is torch.float32:
        block_t, block_o, block_d, stages = 32, 32, 32, 2
    if num_rows == 0:
        return y_TO
    _fixed_linear_kernel[(triton.cdiv(num_rows, block_t) * triton.cdiv(outputs, block_o),)](
        x_TD,
        w_OD,
        bias_O,
        y_TO,
        num_rows,
        outputs=outputs,
        inputs=inputs,
        block_t=block_t,
        block_o=block_o,
        block_d=block_d,
        group_t=GROUP_T,
        stages=stages,
        num_warps=4,
    )
    return y_TO
