"""Triton kernel of kernels/extras/kronecker.py: y += scale * (w1 (x) w2) x with every token's own factors, in one
launch per linear.

Idea: x and y of a token are matrices, X [D1, D2] and Y [O1, O2], so that even one token makes GEMMs of some rows. One
program takes one token and a block of Y. It walks D1 in blocks: for each block it computes the rows of X @ w2.T and
multiplies them by w1's columns, all in registers. w1 and w2 are small, so tokens share them through the L2 cache. Each
output belongs to one program, so no atomics are needed and every run gives the same bits.

Memory: x [T, D] and y [T, O] are this rank's parts. X's element (d1, d2) is x's element d1 * D2 + d2 - first_input if
this rank has it, and zero otherwise. The same holds for Y. The record at the slot's address has the offsets of w1 and
w2 (kernels/extras/kronecker.py). Operands have the weights' dtype if x has it too, and fp32 otherwise.
"""

# T tokens · S slots · O1, O2 output factors · D1, D2 input factors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.extras.kronecker import RECORD_FIELDS
from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8

BLOCK = 64  # rows and columns of Y, and rows of X, that a program processes at a time
BLOCK_D2 = 64
# Outputs for which a program is launched. Factors far from square have more, smaller blocks. With square factors, some
# programs have no block.
OUTPUTS_A_PROGRAM = 1024
MAX_RANGES = 3  # ranges of a linear's outputs in one launch: slices, or the projections that are fused in one


@jit()
def _inner(
    x_row: tl.tensor,
    w2_ptr: tl.tensor,
    d1: tl.tensor,
    d1_end: tl.tensor,
    d2_end: tl.tensor,
    o2: tl.tensor,
    o2_end: tl.tensor,
    first_input: tl.tensor,
    num_inputs: tl.tensor,
    operand: tl.constexpr,
    block: tl.constexpr,
    block_d2: tl.constexpr,
) -> tl.tensor:
    """Returns X[d1] @ w2[o2].T in fp32."""
    acc = tl.zeros((block, block), dtype=tl.float32)
    for first in tl.range(0, d2_end, block_d2):
        d2 = first + tl.arange(0, block_d2)
        inputs = (d1[:, None] * d2_end + d2[None, :]) - first_input
        here = (d1 < d1_end)[:, None] & (d2 < d2_end)[None, :] & (inputs >= 0) & (inputs < num_inputs)
        x = tl.load(x_row + inputs, mask=here, other=0.0).to(operand)
        inside = (d2 < d2_end)[:, None] & (o2 < o2_end)[None, :]
        w2 = tl.load(w2_ptr + o2[None, :].to(tl.int64) * d2_end + d2[:, None], mask=inside, other=0.0).to(operand)
        acc = tl.dot(x, w2, acc, input_precision="ieee")
    return acc


_SIZES = ["row", "first_input", "num_inputs", "y_stride", "first_column"]
_SIZES += [f"{name}_{i}" for name in ("part", "first_output", "num_outputs") for i in range(MAX_RANGES)]


# Nothing about a step, a linear or an adapter may cause another compilation.
@jit(do_not_specialize=["slot_ptr", *_SIZES])
def _kronecker_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    address_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    row: tl.tensor,
    first_input: tl.tensor,
    num_inputs: tl.tensor,
    y_stride: tl.tensor,
    first_column: tl.tensor,
    part_0: tl.tensor,
    part_1: tl.tensor,
    part_2: tl.tensor,
    first_output_0: tl.tensor,
    first_output_1: tl.tensor,
    first_output_2: tl.tensor,
    num_outputs_0: tl.tensor,
    num_outputs_1: tl.tensor,
    num_outputs_2: tl.tensor,
    num_slots: tl.constexpr,
    record_fields: tl.constexpr,
    w_dtype: tl.constexpr,
    operand: tl.constexpr,
    block: tl.constexpr,
    block_d2: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    address = tl.load(address_ptr + row.to(tl.int64) * num_slots + slot)
    if address == 0:
        return
    part, first_output, num_outputs, column = part_0, first_output_0, num_outputs_0, num_outputs_0 * 0
    if tl.program_id(2) == 1:
        part, first_output, num_outputs, column = part_1, first_output_1, num_outputs_1, num_outputs_0
    elif tl.program_id(2) == 2:
        part, first_output, num_outputs, column = part_2, first_output_2, num_outputs_2, num_outputs_0 + num_outputs_1
    record = address.to(tl.pointer_type(tl.int64)) + part * record_fields
    o1_end = tl.load(record + 2).to(tl.int32)
    d1_end = tl.load(record + 3).to(tl.int32)
    o2_end = tl.load(record + 4).to(tl.int32)
    d2_end = tl.load(record + 5).to(tl.int32)
    o2_blocks = tl.cdiv(o2_end, block)
    scale = tl.load(record + 6).to(tl.int32).to(tl.float32, bitcast=True)
    w1_ptr = (address + tl.load(record)).to(tl.pointer_type(w_dtype))
    w2_ptr = (address + tl.load(record + 1)).to(tl.pointer_type(w_dtype))
    x_row = x_ptr + token * num_inputs
    y_row = y_ptr + token * y_stride + first_column + column
    for index in tl.range(tl.program_id(1), tl.cdiv(o1_end, block) * o2_blocks, tl.num_programs(1), num_stages=1):
        o1 = index // o2_blocks * block + tl.arange(0, block)
        o2 = index % o2_blocks * block + tl.arange(0, block)
        acc = tl.zeros((block, block), dtype=tl.float32)
        for first in tl.range(0, d1_end, block, num_stages=1):
            d1 = first + tl.arange(0, block)
            inner = _inner(
                x_row, w2_ptr, d1, d1_end, d2_end, o2, o2_end, first_input, num_inputs, operand, block, block_d2
            )
            inside = (o1 < o1_end)[:, None] & (d1 < d1_end)[None, :]
            w1 = tl.load(w1_ptr + o1[:, None].to(tl.int64) * d1_end + d1[None, :], mask=inside, other=0.0).to(operand)
            acc = tl.dot(w1, inner.to(operand), acc, input_precision="ieee")
        outputs = o1[:, None] * o2_end + o2[None, :] - first_output
        here = (o1 < o1_end)[:, None] & (o2 < o2_end)[None, :] & (outputs >= 0) & (outputs < num_outputs)
        y = tl.load(y_row + outputs, mask=here, other=0.0)
        tl.store(y_row + outputs, (y.to(tl.float32) + acc * scale).to(y.dtype), mask=here)


def apply_kronecker_triton(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Adds the products to y in place. Slots are not checked, since checking would synchronize the GPU."""
    assert x_TD.is_contiguous() and y_TO.is_contiguous()
    assert packed.dtype is not None, "a slot is filled before a step uses it"
    w_dtype = torch.bfloat16 if packed.dtype == FP8 else packed.dtype
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    ranges = [(part, own) for part, all_own in enumerate(packed.place.outputs) for own in all_own]
    column = 0
    for first in range(0, len(ranges), MAX_RANGES):
        some = ranges[first : first + MAX_RANGES]
        num_outputs = [own.stop - own.start for _, own in some]
        unused = [0] * (MAX_RANGES - len(some))
        _kronecker_kernel[(batch.num_tokens, triton.cdiv(max(num_outputs), OUTPUTS_A_PROGRAM), len(some))](
            x_TD,
            y_TO,
            batch.extras.address_VS,
            batch.plan.slot_T,
            batch.extras.kronecker_row(packed.index),
            packed.place.first_input,
            x_TD.shape[1],
            y_TO.shape[1],
            column,
            *(part for part, _ in some),
            *unused,
            *(own.start for _, own in some),
            *unused,
            *num_outputs,
            *unused,
            num_slots=batch.extras.address_VS.shape[1],
            record_fields=RECORD_FIELDS,
            w_dtype=types[w_dtype],
            operand=types[w_dtype if w_dtype == x_TD.dtype else torch.float32],
            block=BLOCK,
            block_d2=BLOCK_D2,
            num_warps=4,
        )
        column += sum(num_outputs)
