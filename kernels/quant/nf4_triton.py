"""NF4 on the GPU: x @ W.T from the four bits for few tokens, and the values of W written out for many tokens.

Idea: with few tokens, the cost of a GEMM is the weight's bytes. So each program reads a tile of bytes once, computes
both halves' values in registers and multiplies them by all tokens on the tensor cores. The values are those that
dequantized() in kernels/quant/nf4.py gives, with the same rounding. Tokens are the columns of the product and weights
its rows: the values go from registers to the tensor cores. If the outputs are too few tiles for the GPU, the tiles'
inputs are divided too, and kernels/lora/split_sum_triton.py adds the parts.

Memory: as in kernels/quant/nf4.py. A tile of bytes is one group wide, so that each of its rows has one magnitude in
each half.
"""

# T tokens · D in · H = D / 2 · O out · G numbers in a group · K splits

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.split_sum_triton import split_sum_triton, steps_a_split, store_part

if TYPE_CHECKING:
    from lorafleet.kernels.quant.nf4 import NF4Weight

LOOKUP = 0 if os.environ.get("TRITON_INTERPRET") == "1" else 1
TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@jit()
def own_value(book_ptr: tl.tensor, lookup: tl.constexpr) -> tl.tensor:
    """Returns the value of the book that this lane of the warp holds for all lanes."""
    if lookup != 1:
        return 0.0
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 lane;
        .reg .b64 at;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 15;
        mul.wide.u32 at, lane, 4;
        add.u64 at, at, $1;
        ld.global.nc.f32 $0, [at];
        }""",
        "=f,l",
        [book_ptr.to(tl.int64)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit()
def values(
    code: tl.tensor,
    absmax: tl.tensor,
    book_ptr: tl.tensor,
    own: tl.tensor,
    quantized_from: tl.constexpr,
    dtype: tl.constexpr,
    lookup: tl.constexpr,
) -> tl.tensor:
    """Returns the values of the codes; only the lowest four bits of each code count."""
    if lookup == 1:
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x100f, 0xffffffff;",
            "=f,f,r",
            [own, code],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        value = tl.load(book_ptr + (code & 15))
    return (value * absmax).to(quantized_from).to(dtype)


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["num_tokens"])
def _nf4_linear_kernel(
    x_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    absmax_ptr: tl.tensor,
    book_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_tokens: tl.tensor,
    outputs: tl.constexpr,
    half: tl.constexpr,
    group: tl.constexpr,
    groups_a_split: tl.constexpr,
    has_bias: tl.constexpr,
    quantized_from: tl.constexpr,
    block_o: tl.constexpr,
    block_t: tl.constexpr,
    stages: tl.constexpr,
    lookup: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    o = tl.program_id(0) * block_o + tl.arange(0, block_o)
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    o_inside, t_inside = o < outputs, t < num_tokens
    first = tl.program_id(2) * groups_a_split
    last = tl.minimum(first + groups_a_split, half // group)
    k = tl.arange(0, group)
    x_tile = x_ptr + t[None, :].to(tl.int64) * (2 * half) + k[:, None]
    packed_tile = packed_ptr + o[:, None].to(tl.int64) * half + k[None, :]
    absmax_row = absmax_ptr + o.to(tl.int64) * (2 * half // group)
    acc = tl.zeros((block_o, block_t), dtype=tl.float32)
    own = own_value(book_ptr, lookup)
    for g in tl.range(first, last, num_stages=stages):
        packed = tl.load(packed_tile + g * group, mask=o_inside[:, None], other=0).to(tl.int32)
        low = tl.load(absmax_row + g, mask=o_inside, other=0.0)[:, None]
        high = tl.load(absmax_row + half // group + g, mask=o_inside, other=0.0)[:, None]
        x_low = tl.load(x_tile + g * group, mask=t_inside[None, :], other=0.0)
        x_high = tl.load(x_tile + half + g * group, mask=t_inside[None, :], other=0.0)
        acc = tl.dot(
            values(packed, low, book_ptr, own, quantized_from, dtype, lookup), x_low, acc, input_precision="ieee"
        )
        acc = tl.dot(
            values(packed >> 4, high, book_ptr, own, quantized_from, dtype, lookup),
            x_high,
            acc,
            input_precision="ieee",
        )
    store_part(acc, bias_ptr, y_ptr, o, t, num_tokens, outputs, has_bias)


@jit(do_not_specialize=["first_row"])
def _dequantize_kernel(
    packed_ptr: tl.tensor,
    absmax_ptr: tl.tensor,
    book_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_row: tl.tensor,
    half: tl.constexpr,
    group: tl.constexpr,
    quantized_from: tl.constexpr,
    block: tl.constexpr,
    lookup: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    o = first_row + row
    k = tl.program_id(1) * block + tl.arange(0, block)
    inside = k < half
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    own = own_value(book_ptr, lookup)
    packed = tl.load(packed_ptr + o * half + k, mask=inside, other=0).to(tl.int32)
    absmax_row = absmax_ptr + o * (2 * half // group)
    low = tl.load(absmax_row + k // group, mask=inside, other=0.0)
    high = tl.load(absmax_row + (half + k) // group, mask=inside, other=0.0)
    out_row = out_ptr + row * (2 * half)
    tl.store(out_row + k, values(packed, low, book_ptr, own, quantized_from, dtype, lookup), mask=inside)
    tl.store(out_row + half + k, values(packed >> 4, high, book_ptr, own, quantized_from, dtype, lookup), mask=inside)


def nf4_linear_triton(x_TD: Tensor, weight: NF4Weight, bias_O: Tensor | None) -> Tensor:
    """Returns x @ W.T + bias. x is contiguous and has the weight's dtype."""
    (num_tokens, inputs), (outputs, half) = x_TD.shape, weight.packed_OH.shape
    assert inputs == 2 * half and x_TD.is_contiguous() and x_TD.dtype == weight.dtype
    assert weight.quantized_from is not None
    block_o, block_t, warps, stages = tile_of(num_tokens)
    groups, tiles = half // weight.group, (triton.cdiv(outputs, block_o), triton.cdiv(num_tokens, block_t))
    groups_a_split = steps_a_split(groups, tiles[0] * tiles[1])
    splits = triton.cdiv(groups, groups_a_split)
    dtype = x_TD.dtype if splits == 1 else torch.float32
    y_KTO = torch.empty(splits, num_tokens, outputs, dtype=dtype, device=x_TD.device)
    _nf4_linear_kernel[(*tiles, splits)](
        x_TD,
        weight.packed_OH,
        weight.absmax_OG,
        weight.book,
        x_TD if bias_O is None else bias_O,
        y_KTO,
        num_tokens,
        outputs=outputs,
        half=half,
        group=weight.group,
        groups_a_split=groups_a_split,
        has_bias=bias_O is not None and splits == 1,
        quantized_from=TL_DTYPES[weight.quantized_from],
        block_o=block_o,
        block_t=block_t,
        stages=stages,
        lookup=LOOKUP,
        num_warps=warps,
    )
    return y_KTO[0] if splits == 1 else split_sum_triton(y_KTO, x_TD.dtype, bias_O)


def tile_of(num_tokens: int) -> tuple[int, int, int, int]:
    """Returns the outputs, tokens, warps and stages of a program, as measured on an H200."""
    if num_tokens <= 16:
        return 64, 16, 4, 5
    if num_tokens <= 32:
        return 64, 32, 4, 5
    return (128, 64, 8, 4) if num_tokens <= 64 else (64, 128, 4, 3)


def dequantize_triton(weight: NF4Weight, out_OD: Tensor, first_row: int = 0) -> Tensor:
    """Writes values of W into out_OD and returns it. It fills all rows of out_OD with rows of W from first_row on."""
    outputs, half = len(out_OD), weight.packed_OH.shape[1]
    assert out_OD.shape[1] == 2 * half and out_OD.is_contiguous() and weight.quantized_from is not None
    assert first_row + outputs <= weight.num_outputs
    block = min(1024, triton.next_power_of_2(half))
    _dequantize_kernel[(outputs, triton.cdiv(half, block))](
        weight.packed_OH,
        weight.absmax_OG,
        weight.book,
        out_OD,
        first_row,
        half=half,
        group=weight.group,
        quantized_from=TL_DTYPES[weight.quantized_from],
        block=block,
        lookup=LOOKUP,
    )
    return out_OD
