"""Integer weights on the GPU: x @ W.T from the codes for few tokens, and the values of W written out for many tokens.

Idea and memory: as in kernels/quant/nf4_triton.py, but a value is (code - zero) * scale, and a byte may be one code of
eight bits. If columns are assigned to groups in any order, each column's group is looked up; the scales then come from
the cache, one for each number.
"""

# T tokens · D in · B bytes of a row · O out · G groups of a row · K splits

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.split_sum_triton import split_sum_triton, steps_a_split, store_part
from lorafleet.kernels.quant.nf4_triton import TL_DTYPES, tile_of

if TYPE_CHECKING:
    from lorafleet.kernels.quant.int_weight import IntWeight


@jit()
def int_values(
    code: tl.tensor,
    column: tl.tensor,
    o: tl.tensor,
    inside: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    group_ptr: tl.tensor,
    projection_ptr: tl.tensor,
    inputs: tl.constexpr,
    groups: tl.constexpr,
    group: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    is_ordered: tl.constexpr,
    quantized_from: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Returns the values of codes; only the lowest bits of each count. column, o and inside are broadcast to them."""
    if is_ordered:
        projection = tl.load(projection_ptr + o, mask=inside, other=0)
        index = tl.load(group_ptr + projection.to(tl.int64) * inputs + column, mask=inside, other=0)
    else:
        index = column // group
    at = o.to(tl.int64) * groups + index
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0)
    zero = 1 << (bits - 1)
    if has_zeros:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.int32)
    number = (code & ((1 << bits) - 1)) - zero
    return (number.to(tl.float32) * scale).to(quantized_from).to(dtype)


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["num_tokens"])
def _int_linear_kernel(
    x_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    group_ptr: tl.tensor,
    projection_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_tokens: tl.tensor,
    outputs: tl.constexpr,
    run: tl.constexpr,
    inputs: tl.constexpr,
    groups: tl.constexpr,
    group: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    is_ordered: tl.constexpr,
    steps_a_split: tl.constexpr,
    has_bias: tl.constexpr,
    quantized_from: tl.constexpr,
    block_o: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    o = tl.program_id(0) * block_o + tl.arange(0, block_o)
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    o_inside, t_inside = o < outputs, t < num_tokens
    first = tl.program_id(2) * steps_a_split
    last = tl.minimum(first + steps_a_split, run // block_k)
    k = tl.arange(0, block_k)
    x_tile = x_ptr + t[None, :].to(tl.int64) * inputs + k[:, None]
    packed_tile = packed_ptr + o[:, None].to(tl.int64) * run + k[None, :]
    acc = tl.zeros((block_o, block_t), dtype=tl.float32)
    for step in tl.range(first, last, num_stages=stages):
        # All columns of a step are in one group, unless they are ordered.
        column = step * block_k + (k[None, :] if is_ordered else tl.zeros((1, 1), dtype=tl.int32))
        packed = tl.load(packed_tile + step * block_k, mask=o_inside[:, None], other=0).to(tl.int32)
        x = tl.load(x_tile + step * block_k, mask=t_inside[None, :], other=0.0)
        low = int_values(
            packed,
            column,
            o[:, None],
            o_inside[:, None],
            scale_ptr,
            zero_ptr,
            group_ptr,
            projection_ptr,
            inputs,
            groups,
            group,
            bits,
            has_zeros,
            is_ordered,
            quantized_from,
            dtype,
        )
        acc = tl.dot(low, x, acc, input_precision="ieee")
        if bits == 4:
            x_high = tl.load(x_tile + run + step * block_k, mask=t_inside[None, :], other=0.0)
            high = int_values(
                packed >> 4,
                run + column,
                o[:, None],
                o_inside[:, None],
                scale_ptr,
                zero_ptr,
                group_ptr,
                projection_ptr,
                inputs,
                groups,
                group,
                bits,
                has_zeros,
                is_ordered,
                quantized_from,
                dtype,
            )
            acc = tl.dot(high, x_high, acc, input_precision="ieee")
    store_part(acc, bias_ptr, y_ptr, o, t, num_tokens, outputs, has_bias)


@jit(do_not_specialize=["first_row"])
def _dequantize_int_kernel(
    packed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    group_ptr: tl.tensor,
    projection_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_row: tl.tensor,
    run: tl.constexpr,
    inputs: tl.constexpr,
    groups: tl.constexpr,
    group: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    is_ordered: tl.constexpr,
    quantized_from: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < inputs
    o = first_row + row + tl.zeros((block,), dtype=tl.int64)
    packed = tl.load(packed_ptr + o * run + column % run, mask=inside, other=0).to(tl.int32)
    value = int_values(
        packed >> (4 * (column // run)),
        column,
        o,
        inside,
        scale_ptr,
        zero_ptr,
        group_ptr,
        projection_ptr,
        inputs,
        groups,
        group,
        bits,
        has_zeros,
        is_ordered,
        quantized_from,
        out_ptr.dtype.element_ty,
    )
    tl.store(out_ptr + row * inputs + column, value, mask=inside)


def int_linear_triton(x_TD: Tensor, weight: IntWeight, bias_O: Tensor | None) -> Tensor:
    """Returns x @ W.T + bias. x is contiguous and has the weight's dtype."""
    (num_tokens, inputs), outputs = x_TD.shape, weight.num_outputs
    assert inputs == weight.num_inputs and x_TD.is_contiguous() and x_TD.dtype == weight.dtype
    block_o, block_t, warps, stages = tile_of(num_tokens)
    steps, tiles = weight.run // weight.step, (triton.cdiv(outputs, block_o), triton.cdiv(num_tokens, block_t))
    per_split = steps_a_split(steps, tiles[0] * tiles[1])
    splits = triton.cdiv(steps, per_split)
    dtype = x_TD.dtype if splits == 1 else torch.float32
    y_KTO = torch.empty(splits, num_tokens, outputs, dtype=dtype, device=x_TD.device)
    _int_linear_kernel[(*tiles, splits)](
        x_TD,
        *_tensors(weight),
        x_TD if bias_O is None else bias_O,
        y_KTO,
        num_tokens,
        outputs=outputs,
        run=weight.run,
        inputs=inputs,
        groups=weight.scale_OG.shape[1],
        group=weight.group,
        bits=weight.bits,
        has_zeros=weight.zero_OG is not None,
        is_ordered=weight.is_ordered,
        steps_a_split=per_split,
        has_bias=bias_O is not None and splits == 1,
        quantized_from=TL_DTYPES[weight.quantized_from],
        block_o=block_o,
        block_t=block_t,
        block_k=weight.step,
        stages=stages,
        num_warps=warps,
    )
    return y_KTO[0] if splits == 1 else split_sum_triton(y_KTO, x_TD.dtype, bias_O)


def dequantize_int_triton(weight: IntWeight, out_OD: Tensor, first_row: int = 0) -> Tensor:
    """Writes values of W into out_OD and returns it. It fills all rows of out_OD with rows of W from first_row on."""
    outputs, inputs = out_OD.shape
    assert inputs == weight.num_inputs and out_OD.is_contiguous() and first_row + outputs <= weight.num_outputs
    block = min(1024, triton.next_power_of_2(inputs))
    _dequantize_int_kernel[(outputs, triton.cdiv(inputs, block))](
        *_tensors(weight),
        out_OD,
        first_row,
        run=weight.run,
        inputs=inputs,
        groups=weight.scale_OG.shape[1],
        group=weight.group,
        bits=weight.bits,
        has_zeros=weight.zero_OG is not None,
        is_ordered=weight.is_ordered,
        quantized_from=TL_DTYPES[weight.quantized_from],
        block=block,
    )
    return out_OD


def _tensors(weight: IntWeight) -> tuple[Tensor, ...]:
    """Returns the kernels' tensors. The codes stand for tensors that the weight lacks, which are not read."""
    found = weight.packed_OB, weight.scale_OG, weight.zero_OG, weight.group_PD, weight.projection_O
    return tuple(weight.packed_OB if tensor is None else tensor for tensor in found)
