"""8-bit codes on the GPU: x @ W.T from e4m3 or int8 for few tokens, and the values, or x rounded to e4m3, for many.

Idea: as in kernels/quant/nf4_triton.py, but codes become bf16 without rounding. A scale multiplies the sum over the
columns that it belongs to: the whole row, or a group, which is then a multiple of the tile's width.
"""

# T tokens · D in · O out · G groups of columns · K splits

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.split_sum_triton import split_sum_triton, steps_a_split, store_part
from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX

BLOCK_D = 128
CODE_DTYPES = (FP8, torch.int8)


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["num_tokens"])
def _scaled_linear_kernel(
    x_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_tokens: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    group: tl.constexpr,
    blocks_a_split: tl.constexpr,
    is_whole: tl.constexpr,
    has_bias: tl.constexpr,
    block_o: tl.constexpr,
    block_t: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    o = tl.program_id(0) * block_o + tl.arange(0, block_o)
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    o_inside, t_inside = o < outputs, t < num_tokens
    first = tl.program_id(2) * blocks_a_split * block_d
    last = tl.minimum(first + blocks_a_split * block_d, inputs)
    d = tl.arange(0, block_d)
    x_tile = x_ptr + t[None, :].to(tl.int64) * inputs + d[:, None]
    code_tile = code_ptr + o[:, None].to(tl.int64) * inputs + d[None, :]
    acc = tl.zeros((block_o, block_t), dtype=tl.float32)
    for first_d in tl.range(first, last, block_d, num_stages=stages):
        d_inside = first_d + d < inputs
        code = tl.load(code_tile + first_d, mask=o_inside[:, None] & d_inside[None, :], other=0.0)
        x = tl.load(x_tile + first_d, mask=t_inside[None, :] & d_inside[:, None], other=0.0)
        if group < inputs:
            scale = tl.load(scale_ptr + o * (inputs // group) + first_d // group, mask=o_inside, other=0.0)
            acc += tl.dot(code.to(dtype), x, input_precision="ieee") * scale[:, None]
        else:
            acc = tl.dot(code.to(dtype), x, acc, input_precision="ieee")
    if group == inputs and is_whole:
        acc *= tl.load(scale_ptr + o, mask=o_inside, other=0.0)[:, None]
    store_part(acc, bias_ptr, y_ptr, o, t, num_tokens, outputs, has_bias)


@jit()
def _dequantize_codes_kernel(
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    inputs: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block + tl.arange(0, block)
    inside = d < inputs
    code = tl.load(code_ptr + row * inputs + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row * (inputs // group) + d // group, mask=inside, other=0.0)
    tl.store(out_ptr + row * inputs + d, (code * scale).to(out_ptr.dtype.element_ty), mask=inside)


@jit()
def _quantize_tokens_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, scale_ptr: tl.tensor, inputs: tl.constexpr, block: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, block)
    largest = tl.zeros((block,), dtype=tl.float32)
    for first_d in tl.range(0, inputs, block):
        x = tl.load(x_ptr + token * inputs + first_d + d, mask=first_d + d < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.maximum(tl.max(largest), 1e-12) / 448.0
    tl.store(scale_ptr + token, scale)
    for first_d in tl.range(0, inputs, block):
        x = tl.load(x_ptr + token * inputs + first_d + d, mask=first_d + d < inputs, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0)
        tl.store(out_ptr + token * inputs + first_d + d, scaled.to(tl.float8e4nv), mask=first_d + d < inputs)


def scaled_linear_triton(x_TD: Tensor, code_OD: Tensor, scale_OG: Tensor, bias_O: Tensor | None) -> Tensor:
    """Returns x @ (scale * code).T + bias. All tensors are contiguous.

    With more than one group, groups are multiples of 16 columns.
    """
    (num_tokens, inputs), (outputs, num_groups) = x_TD.shape, scale_OG.shape
    assert code_OD.shape == (outputs, inputs) and code_OD.dtype in CODE_DTYPES and inputs % num_groups == 0
    assert x_TD.is_contiguous() and code_OD.is_contiguous() and scale_OG.is_contiguous()
    group = inputs // num_groups
    block_d = BLOCK_D if num_groups == 1 else math.gcd(BLOCK_D, group)
    assert block_d >= 16
    block_o, block_t, warps, stages = tile_of(num_tokens)
    blocks, tiles = triton.cdiv(inputs, block_d), (triton.cdiv(outputs, block_o), triton.cdiv(num_tokens, block_t))
    blocks_a_split = steps_a_split(blocks, tiles[0] * tiles[1])
    splits = triton.cdiv(blocks, blocks_a_split)
    dtype = x_TD.dtype if splits == 1 else torch.float32
    y_KTO = torch.empty(splits, num_tokens, outputs, dtype=dtype, device=x_TD.device)
    _scaled_linear_kernel[(*tiles, splits)](
        x_TD,
        code_OD,
        scale_OG,
        scale_OG if bias_O is None else bias_O,
        y_KTO,
        num_tokens,
        outputs=outputs,
        inputs=inputs,
        group=group,
        blocks_a_split=blocks_a_split,
        is_whole=splits == 1,
        has_bias=bias_O is not None and splits == 1,
        block_o=block_o,
        block_t=block_t,
        block_d=block_d,
        stages=stages,
        num_warps=warps,
    )
    if splits == 1:
        return y_KTO[0]
    return split_sum_triton(y_KTO, x_TD.dtype, bias_O, scale_OG if num_groups == 1 else None)


def dequantize_codes_triton(code_OD: Tensor, scale_OG: Tensor, out_OD: Tensor) -> Tensor:
    """Writes code * scale into out_OD, rounded once, and returns it. All tensors are contiguous."""
    outputs, inputs = code_OD.shape
    assert out_OD.shape == code_OD.shape and out_OD.is_contiguous() and code_OD.is_contiguous()
    block = min(1024, triton.next_power_of_2(inputs))
    _dequantize_codes_kernel[(outputs, triton.cdiv(inputs, block))](
        code_OD, scale_OG, out_OD, inputs=inputs, group=inputs // scale_OG.shape[1], block=block
    )
    return out_OD


def tile_of(num_tokens: int) -> tuple[int, int, int, int]:
    """Returns the outputs, tokens, warps and stages of a program."""
    return (64, 16, 4, 5) if num_tokens <= 16 else (128, 64, 8, 4)


def quantize_tokens_triton(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x in e4m3, and the scale of each token, float32 [T].

    x is their product. The scales are those of quantize_rows in kernels/quant/scaled_matrix.py.
    """
    assert x_TD.is_contiguous()
    out_TD = torch.empty(x_TD.shape, dtype=FP8, device=x_TD.device)
    scale_T = torch.empty(len(x_TD), dtype=torch.float32, device=x_TD.device)
    block = min(4096, triton.next_power_of_2(x_TD.shape[1]))
    _quantize_tokens_kernel[(len(x_TD),)](x_TD, out_TD, scale_T, inputs=x_TD.shape[1], block=block)
    return out_TD, scale_T


assert FP8_MAX == 448.0  # _quantize_tokens_kernel has the same number
