"""Linears of the base for few rows. kernels/linear/split_linear.py has their twins.

Idea: W is the first operand of the tensor cores, so that its rows fill their 64 rows and x's few rows are the narrow
side. A program computes a tile of outputs from its split of the inputs. If it starts early, it first requests the
beginning of its rows of W, which no kernel writes, into the L2 cache, and then waits for x.

Memory: x is [T, D], W [O, D], the sums [K, T, O] in float32. A gated W has the gates' rows, then those of up, and
the result is [T, I] in x's dtype. Source: split-K GEMM; programmatic dependent launch, CUDA programming guide.
"""

# T rows · D in · O out · I intermediate size · K splits

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.linear_tuning import MIN_BLOCK_T, MOST_SPLIT_ROWS, PREFETCH_CHUNK, LinearShape
from lorafleet.kernels.linear.split_sums_triton import early_launch
from lorafleet.kernels.lora.linear_output import LinearOutput, SplitSums


@jit()
def request_rows(
    w_ptr: tl.tensor, first_row: tl.tensor, first_d: tl.tensor, inputs: tl.tensor, rows: tl.constexpr,
    prefetch: tl.constexpr, chunk: tl.constexpr,
) -> None:  # fmt: skip
    """Requests `prefetch` inputs of each of the rows into the L2 cache."""
    chunks: tl.constexpr = prefetch // chunk
    index = tl.arange(0, rows * chunks)
    row = (first_row + index // chunks).to(tl.int64)
    size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    address = w_ptr.to(tl.int64) + (row * inputs + first_d + index % chunks * chunk) * size
    num_bytes = tl.full((rows * chunks,), chunk * size, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address, num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# The number of rows changes from graph to graph, and the other sizes from linear to linear: one compiled kernel serves
# all that divide alike.
@jit(do_not_specialize=["num_rows", "steps", "last_steps"])
def _split_linear_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    steps: tl.tensor,
    last_steps: tl.tensor,
    has_bias: tl.constexpr,
    gated: tl.constexpr,
    early: tl.constexpr,
    prefetch: tl.constexpr,
    chunk: tl.constexpr,
    block_o: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    """`outputs` is that of each half if the linear is gated."""
    first_o = tl.program_id(0) * block_o
    split = tl.program_id(1)
    first_d = split * steps * block_d
    if early:
        gdc_launch_dependents()
        if prefetch > 0:
            request_rows(w_ptr, first_o, first_d, inputs, block_o, prefetch, chunk)
            if gated:
                request_rows(w_ptr, outputs + first_o, first_d, inputs, block_o, prefetch, chunk)
        gdc_wait()
    o = first_o + tl.arange(0, block_o)
    t = tl.arange(0, block_t)
    d = tl.arange(0, block_d)
    t_inside = t < num_rows
    x_tile = x_ptr + t[None, :] * inputs + (first_d + d)[:, None]
    w_tile = w_ptr + o[:, None].to(tl.int64) * inputs + (first_d + d)[None, :]
    up_tile = w_tile + tl.cast(outputs, tl.int64) * inputs
    own_steps = steps
    if split == tl.num_programs(1) - 1:
        own_steps = last_steps
    acc = tl.zeros((block_o, block_t), dtype=tl.float32)
    up = tl.zeros((block_o, block_t), dtype=tl.float32)
    for step in tl.range(0, own_steps, num_stages=stages):
        x = tl.load(x_tile + step * block_d, mask=t_inside[None, :], other=0.0)
        acc = tl.dot(tl.load(w_tile + step * block_d), x, acc, input_precision="ieee")
        if gated:
            up = tl.dot(tl.load(up_tile + step * block_d), x, up, input_precision="ieee")
    if has_bias:
        acc += tl.load(bias_ptr + o, mask=(o < outputs) & (split == 0), other=0.0).to(tl.float32)[:, None]
    if gated:
        acc = acc * tl.sigmoid(acc) * up
    row = split * num_rows + t
    out_tile = out_ptr + row[None, :].to(tl.int64) * outputs + o[:, None]
    tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=t_inside[None, :])


def split_linear_triton(x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None, shape: LinearShape) -> LinearOutput:
    """Computes split_linear in float32 sums. A shape that is meant for gated_linear serves too."""
    (num_rows, _), outputs = x_TD.shape, len(w_OD)
    part_KTO = torch.empty(shape.splits, num_rows, outputs, dtype=torch.float32, device=x_TD.device)
    _launch(x_TD, w_OD, bias_O, part_KTO, shape, outputs, gated=False)
    y_TO = torch.empty(num_rows, outputs, dtype=x_TD.dtype, device=x_TD.device)
    return LinearOutput(y_TO, sums=SplitSums(part_KTO, shape.early))


def gated_linear_triton(x_TD: Tensor, w_OD: Tensor, shape: LinearShape) -> Tensor:
    assert shape.gated
    size = len(w_OD) // 2
    out_TI = torch.empty(len(x_TD), size, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, w_OD, None, out_TI, shape, size, gated=True)
    return out_TI


def _launch(
    x_TD: Tensor, w_OD: Tensor, bias_O: Tensor | None, out: Tensor, shape: LinearShape, outputs: int, gated: bool
) -> None:
    num_rows, inputs = x_TD.shape
    assert w_OD.shape[1] == inputs and shape.fits(len(w_OD), inputs), (w_OD.shape, shape)
    assert x_TD.is_contiguous() and w_OD.is_contiguous() and x_TD.dtype == w_OD.dtype
    assert 0 < num_rows <= MOST_SPLIT_ROWS and not shape.is_wide
    assert bias_O is None or (bias_O.shape == (outputs,) and bias_O.is_contiguous())
    last_steps = shape.last_steps(inputs)
    prefetch = shape.prefetch if shape.prefetch <= last_steps * shape.block_d else 0
    _split_linear_kernel[(outputs // shape.block_o, shape.splits)](
        x_TD,
        w_OD,
        bias_O,
        out,
        num_rows,
        outputs,
        inputs,
        shape.steps(inputs),
        last_steps,
        has_bias=bias_O is not None,
        gated=gated,
        early=shape.early,
        prefetch=prefetch,
        chunk=PREFETCH_CHUNK,
        block_o=shape.block_o,
        block_t=max(MIN_BLOCK_T, triton.next_power_of_2(num_rows)),
        block_d=shape.block_d,
        stages=shape.stages,
        num_warps=shape.warps,
        **early_launch(shape.early),
    )
