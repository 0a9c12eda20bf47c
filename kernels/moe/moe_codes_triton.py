"""Linears of a mixture whose experts are quantized: the GEMM of kernels/moe/moe_triton.py over codes and scales.

Idea: programs take the same tiles of pairs. Each reads a block of codes, computes their values in registers and
multiplies them by all pairs of the tile, as in kernels/quant: weights are the rows of the product and pairs its
columns. Values are rounded as dequantized() of the weight rounds them. There is one exception: if all columns of a step
share a scale, 8-bit codes are multiplied first, and the scale multiplies the float32 sum. For few pairs a tile, e4m3
codes go into the tensor cores as they are, and x is split into pairs of e4m3 numbers (kernels/quant/e4m3_pairs.py).

Memory: kernels/quant/scaled_weight.py, nf4.py and int_weight.py describe the codes. An expert's rows follow each other.
A row has one or two runs of columns: with four bits, a byte has a number of each run.
The shapes of the programs are those of the dense kernels, and were not measured for experts.
"""

# N pairs · D in · O out · E experts · W = E * O rows

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.kernels.moe.moe_tiles_triton import ExpertTiles
from lorafleet.kernels.quant.e4m3_pairs import LEAST_PAIR_BLOCK
from lorafleet.kernels.quant.e4m3_pairs_triton import pair_product, split_block
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.int_triton import int_values
from lorafleet.kernels.quant.int_weight import IntWeight
from lorafleet.kernels.quant.nf4 import NF4Weight
from lorafleet.kernels.quant.nf4_triton import LOOKUP, TL_DTYPES, own_value, values
from lorafleet.kernels.quant.scaled_weight import E4M3_CAPABILITY, PAIR_CAPABILITY, ScaledWeight
from lorafleet.kernels.quant.tiled_weight import TiledWeight

BLOCK_K = 128  # columns of a step, if they share a scale; half of it for many pairs a tile
LEAST_BLOCK_K = 16  # of tensor cores
LOOKUP_BLOCK_K = 32  # columns of a step, if each number's scale is looked up
SCALED, E4M3_BITS, BOOK, INTS = (tl.constexpr(kind) for kind in range(4))  # the kinds of codes


@jit()
def _eight_bits(code: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Returns the float32 values of 8-bit codes."""
    if kind == E4M3_BITS:  # on GPUs that do not convert e4m3: as float16 they are 256 times smaller
        bits = code.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return code.to(tl.float32)


@jit()
def _values(
    code: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    group_ptr: tl.tensor,
    projection_ptr: tl.tensor,
    own: tl.tensor,
    num_features: tl.constexpr,
    groups: tl.constexpr,
    group: tl.constexpr,
    kind: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    is_ordered: tl.constexpr,
    quantized_from: tl.constexpr,
    dtype: tl.constexpr,
    lookup: tl.constexpr,
) -> tl.tensor:
    """Returns the values of codes. row, column and inside have one shape, which is broadcast to the codes'."""
    if kind == INTS:
        return int_values(
            code,
            column,
            row,
            inside,
            scale_ptr,
            table_ptr,
            group_ptr,
            projection_ptr,
            num_features,
            groups,
            group,
            bits,
            has_zeros,
            is_ordered,
            quantized_from,
            dtype,
        )
    scale = tl.load(scale_ptr + row * groups + column // group, mask=inside, other=0.0).to(tl.float32)
    if kind == BOOK:
        return values(code, scale, table_ptr, own, quantized_from, dtype, lookup)
    return (_eight_bits(code, kind) * scale).to(dtype)


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["pairs_a_row"])
def _codes_linear_kernel(
    x_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    group_ptr: tl.tensor,
    projection_ptr: tl.tensor,
    out_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    pairs_a_row: tl.tensor,
    num_features: tl.constexpr,
    num_outputs: tl.constexpr,
    run: tl.constexpr,
    groups: tl.constexpr,
    group: tl.constexpr,
    kind: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    is_ordered: tl.constexpr,
    shares_scale: tl.constexpr,
    splits_x: tl.constexpr,
    quantized_from: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_o: tl.constexpr,
    block_k: tl.constexpr,
    lookup: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    is_scaled: tl.constexpr = (kind == SCALED) | (kind == E4M3_BITS)
    blocks: tl.constexpr = (num_outputs + block_o - 1) // block_o
    tile = tl.program_id(0) // blocks
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + tile * tile_pairs + tl.arange(0, tile_pairs)).to(tl.int64)
    there = (pair >= 0)[None, :]
    o = (tl.program_id(0) % blocks) * block_o + tl.arange(0, block_o)
    o_inside = (o < num_outputs)[:, None]
    row = (expert * num_outputs + o)[:, None]
    k = tl.arange(0, block_k)
    x_tile = x_ptr + (pair // pairs_a_row)[None, :] * num_features + k[:, None]
    code_tile = code_ptr + row * run + k[None, :]
    own = own_value(table_ptr, lookup) if kind == BOOK else 0.0
    acc = tl.zeros((block_o, tile_pairs), dtype=tl.float32)
    for first in tl.range(0, run, block_k, num_stages=stages):
        k_inside = first + k < run
        zero: tl.constexpr = 0.0 if kind == SCALED else 0
        code = tl.load(code_tile + first, mask=o_inside & k_inside[None, :], other=zero)
        x = tl.load(x_tile + first, mask=there & k_inside[:, None], other=0.0)
        if is_scaled and shares_scale:
            if splits_x:
                x_pairs, x_scale = split_block(x)
                product = pair_product(code, x_pairs) * x_scale[None, :]
            else:
                product = tl.dot(_eight_bits(code, kind).to(dtype), x, input_precision="ieee")
            if group < num_features:
                product *= tl.load(scale_ptr + row * groups + first // group, mask=o_inside, other=0.0)
            acc += product
        else:
            if not is_scaled:
                code = code.to(tl.int32)
            if shares_scale:
                number_row, column, inside = row, first + tl.zeros((1, 1), dtype=tl.int32), o_inside
            else:
                number_row = row + tl.zeros((1, block_k), dtype=tl.int64)
                column = first + k[None, :] + tl.zeros((block_o, 1), dtype=tl.int32)
                inside = o_inside & k_inside[None, :]
            low = _values(
                code,
                number_row,
                column,
                inside,
                scale_ptr,
                table_ptr,
                group_ptr,
                projection_ptr,
                own,
                num_features,
                groups,
                group,
                kind,
                bits,
                has_zeros,
                is_ordered,
                quantized_from,
                dtype,
                lookup,
            )
            acc = tl.dot(low, x, acc, input_precision="ieee")
            if bits == 4:
                x_high = tl.load(x_tile + run + first, mask=there & k_inside[:, None], other=0.0)
                high = _values(
                    code >> 4,
                    number_row,
                    run + column,
                    inside,
                    scale_ptr,
                    table_ptr,
                    group_ptr,
                    projection_ptr,
                    own,
                    num_features,
                    groups,
                    group,
                    kind,
                    bits,
                    has_zeros,
                    is_ordered,
                    quantized_from,
                    dtype,
                    lookup,
                )
                acc = tl.dot(high, x_high, acc, input_precision="ieee")
    if is_scaled and shares_scale and group == num_features:
        acc *= tl.load(scale_ptr + row, mask=o_inside, other=0.0)
    out = out_ptr + pair[None, :] * num_outputs + o[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=there & o_inside)


@dataclass(frozen=True, slots=True)
class _Codes:
    """The tensors and settings of one kind of codes, as the kernel takes them."""

    kind: int
    code_WB: Tensor
    scale_WG: Tensor
    group: int  # columns of a group
    bits: int = 8
    table: Tensor | None = None  # the book of BOOK or the zeros of INTS
    group_PD: Tensor | None = None  # see IntWeight
    projection_W: Tensor | None = None
    quantized_from: torch.dtype = torch.float32


def _codes_of(weight: ScaledWeight | NF4Weight | IntWeight) -> _Codes:
    if isinstance(weight, ScaledWeight):
        return _scaled_codes(weight)
    if isinstance(weight, NF4Weight):
        assert weight.quantized_from is not None
        return _Codes(
            BOOK.value,
            weight.packed_OH,
            weight.absmax_OG,
            weight.group,
            4,
            weight.book,
            quantized_from=weight.quantized_from,
        )
    return _Codes(
        INTS.value,
        weight.packed_OB,
        weight.scale_OG,
        weight.group,
        weight.bits,
        weight.zero_OG,
        weight.group_PD,
        weight.projection_O,
        weight.quantized_from,
    )


def _scaled_codes(weight: ScaledWeight) -> _Codes:
    code = weight.code_OD
    if code.dtype == FP8 and code.is_cuda and torch.cuda.get_device_capability(code.device) < E4M3_CAPABILITY:
        return _Codes(E4M3_BITS.value, code.view(torch.uint8), weight.scale_OG, weight.group)
    return _Codes(SCALED.value, code, weight.scale_OG, weight.group)


def _multiplies_e4m3(codes: _Codes, x: Tensor) -> bool:
    """Returns whether x can be split into pairs and multiplied by the codes as they are."""
    return (
        codes.code_WB.dtype == FP8
        and x.dtype == torch.bfloat16  # pairs hold its 8 bits
        and torch.cuda.get_device_capability(x.device) >= PAIR_CAPABILITY
    )


def codes_linear(x: Tensor, experts: ExpertCodes, tiles: ExpertTiles, num_pairs: int) -> Tensor:
    """Returns for each pair x times its expert's weight, [N, O]. x is [T, D] or [N, D], and contiguous."""
    assert not isinstance(experts.weight, TiledWeight)
    codes, (_, num_outputs, num_features) = _codes_of(experts.weight), experts.shape
    assert x.is_contiguous() and x.shape[1] == num_features and num_pairs % len(x) == 0
    assert x.dtype == experts.weight.dtype
    is_ordered, whole_rows = codes.group_PD is not None, codes.group == num_features
    run = num_features * codes.bits // 8
    few = tiles.tile_pairs <= 32
    most = BLOCK_K if few else BLOCK_K // 2
    step = most if whole_rows and codes.bits == 8 else math.gcd(codes.group, most)
    shares_scale = step >= LEAST_BLOCK_K and not is_ordered
    splits_x = few and step >= LEAST_PAIR_BLOCK and _multiplies_e4m3(codes, x)
    out_NO = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    block_o, warps, stages = (64, 4, 4) if few else (128, 8, 3)
    _codes_linear_kernel[(tiles.num_tiles * triton.cdiv(num_outputs, block_o),)](
        x,
        codes.code_WB,
        codes.scale_WG,
        codes.scale_WG if codes.table is None else codes.table,
        codes.scale_WG if codes.group_PD is None else codes.group_PD,
        codes.scale_WG if codes.projection_W is None else codes.projection_W,
        out_NO,
        tiles.expert_M,
        tiles.pair_MB,
        num_pairs // len(x),
        num_features=num_features,
        num_outputs=num_outputs,
        run=run,
        groups=codes.scale_WG.shape[1],
        group=codes.group,
        kind=codes.kind,
        bits=codes.bits,
        has_zeros=codes.kind == INTS.value and codes.table is not None,
        is_ordered=is_ordered,
        shares_scale=shares_scale,
        splits_x=splits_x,
        quantized_from=TL_DTYPES[codes.quantized_from],
        tile_pairs=tiles.tile_pairs,
        block_o=block_o,
        block_k=step if shares_scale else LOOKUP_BLOCK_K,
        lookup=LOOKUP,
        stages=stages if x.dtype.itemsize == 2 else 2,  # limited by the size of shared memory
        num_warps=warps,
    )
    return out_NO
