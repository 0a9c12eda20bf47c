"""The first linear of a gated MLP for more rows than kernels/linear/split_linear_triton.py serves.

Idea: W is the first operand of the tensor cores, and a program computes a tile of gates and the same tile of up, so
that SiLU(gate) * up needs no other kernel. Tiles are loaded by descriptors (TMA), which leaves the registers to the
sums, and reads rows beyond the last as zeros. Programs that share a tile of W follow each other, so one of them reads
it from memory and the others from the L2 cache.

Memory: x is [T, D] and W [O, D], the gates' rows and then those of up. The result is [T, I] in x's dtype.
"""

# T rows · D in · O out · I intermediate size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.linear_tuning import LinearShape
from lorafleet.kernels.linear.split_sums_triton import early_launch


@jit(do_not_specialize=["num_rows"])
def _wide_gated_kernel(
    x: tl.tensor_descriptor,
    w: tl.tensor_descriptor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    inputs: tl.tensor,
    early: tl.constexpr,
    block_o: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """`size` is I, which is half of W's rows."""
    first_t = tl.program_id(0) * block_t
    first_o = tl.program_id(1) * block_o
    if early:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.zeros((block_o, block_t), dtype=tl.float32)
    up = tl.zeros((block_o, block_t), dtype=tl.float32)
    for d in tl.range(0, inputs, block_d, num_stages=stages):
        x_tile = x.load([first_t, d]).T
        gate = tl.dot(w.load([first_o, d]), x_tile, gate, input_precision="ieee")
        up = tl.dot(w.load([size + first_o, d]), x_tile, up, input_precision="ieee")
    out = gate * tl.sigmoid(gate) * up
    t = first_t + tl.arange(0, block_t)
    o = first_o + tl.arange(0, block_o)
    out_tile = out_ptr + t[None, :].to(tl.int64) * size + o[:, None]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=(t < num_rows)[None, :])


def wide_gated_triton(x_TD: Tensor, w_OD: Tensor, shape: LinearShape) -> Tensor:
    """Computes gated_linear in a wide shape."""
    (num_rows, inputs), size = x_TD.shape, len(w_OD) // 2
    assert shape.is_wide and w_OD.shape[1] == inputs and shape.fits(len(w_OD), inputs), (w_OD.shape, shape)
    assert x_TD.is_contiguous() and w_OD.is_contiguous() and x_TD.dtype == w_OD.dtype
    out_TI = torch.empty(num_rows, size, dtype=x_TD.dtype, device=x_TD.device)
    _wide_gated_kernel[(triton.cdiv(num_rows, shape.block_t), size // shape.block_o)](
        TensorDescriptor.from_tensor(x_TD, [shape.block_t, shape.block_d]),
        TensorDescriptor.from_tensor(w_OD, [shape.block_o, shape.block_d]),
        out_TI,
        num_rows,
        size,
        inputs,
        early=shape.early,
        block_o=shape.block_o,
        block_t=shape.block_t,
        block_d=shape.block_d,
        stages=shape.stages,
        num_warps=shape.warps,
        **early_launch(shape.early),
    )
    return out_TI
