"""The adapters' parts of a mixture's linears on the GPU, for all pairs of a step and any mix of adapters.
kernels/moe/moe_torch.py has the twin.

Idea: a tile's pairs share an expert and a slot (AdapterTiles), so a program reads one A or one B. shrink_experts writes
P = scale * A x; a program takes some tiles and one split of D. Whatever reads the linear's output multiplies P by B:
the activation (kernels/moe/adapted_activation_triton.py), the weighted sum
(kernels/moe/adapted_combine_triton.py), or, where that would read B too often, expand_experts before the sum. A
program of expand_experts takes some tiles and one block of outputs.

Memory: P [K, N, C] is fp32, with C as in kernels/moe/expert_lora.py. A and B lie at the offsets in the slot's record.
delta [N, O] has the dtype of the linear's output. Neither P nor delta is written for pairs whose slot has nothing on
this linear, and columns of P that the slot does not have are not written either.
"""

# N pairs · D in · O out · K splits of D · C columns of P · S slots

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.expert_lora import StepExperts
from lorafleet.kernels.moe.moe_tiles_triton import AdapterTiles

SPLIT_FEATURES = 512  # features of D in a split, for few pairs a tile
MAX_SPLITS = 8
LARGE_TILE = 64  # tiles of so many pairs give the GPU enough work without splits
SHRINK_D = 128  # features that a program processes at a time, in half precision
EXPAND_O = 256
MIN_BLOCK_C, MAX_BLOCK_C = 16, 32
# Programs of a launch for each split or block of outputs. If there are more tiles, a program takes every
# MOST_PROGRAMS-th, so that unused tiles cost little.
MOST_PROGRAMS = 2048
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@jit()
def field(record: tl.tensor, number: tl.constexpr) -> tl.tensor:
    return tl.load(record.to(tl.pointer_type(tl.int64)) + number)


@jit()
def rank_of(record: tl.tensor) -> tl.tensor:
    return tl.multiple_of(field(record, 3).to(tl.int32), 8)


@jit()
def b_of(record: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return tl.multiple_of((record + field(record, 1)).to(tl.pointer_type(dtype)), 16)


@jit()
def record_of(slot_ptr: tl.tensor, index: tl.tensor, record_ptr: tl.tensor) -> tl.tensor:
    """Returns the address of the record of slot_ptr[index], or 0 if there is nothing."""
    slot = tl.load(slot_ptr + index)
    return tl.load(record_ptr + slot, mask=slot >= 0, other=0)


@jit()
def pairs_of_tile(tile: tl.tensor, pair_ptr: tl.tensor, start_ptr: tl.tensor, tile_pairs: tl.constexpr) -> tl.tensor:
    """Returns the tile's pairs (int64), then -1."""
    place = tl.load(start_ptr + tile) + tl.arange(0, tile_pairs)
    return tl.load(pair_ptr + place, mask=place < tl.load(start_ptr + tile + 1), other=-1).to(tl.int64)


@jit()
def add_expanded(
    acc: tl.tensor,
    p_row: tl.tensor,
    there: tl.tensor,
    b_row: tl.tensor,
    inside: tl.tensor,
    rank: tl.tensor,
    split_stride: tl.tensor,
    num_splits: tl.constexpr,
    block_r: tl.constexpr,
) -> tl.tensor:
    """Returns acc + P B, for P's rows at p_row [pairs, 1] and B's rows at b_row [1, outputs]."""
    for first in tl.range(0, rank, block_r, num_stages=1):  # hardly ever a second turn
        r = first + tl.arange(0, block_r)
        p_block = p_row + r[None, :]
        mask = there & (r < rank)[None, :]
        p = tl.load(p_block, mask=mask, other=0.0)
        for split in tl.static_range(1, num_splits):
            p += tl.load(p_block + split * split_stride, mask=mask, other=0.0)
        b = tl.load(b_row + r[:, None], mask=inside & (r < rank)[:, None], other=0.0)
        acc = tl.dot(p.to(b.dtype), b, acc, input_precision="ieee")
    return acc


# Slots and records begin anywhere in larger tensors: their alignment must not cause another compilation.
@jit(do_not_specialize=["record_ptr", "pairs_a_row", "num_pairs", "num_columns", "num_tiles"])
def _shrink_kernel(
    x_ptr: tl.tensor,
    p_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    slot_of_tile_ptr: tl.tensor,
    start_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    record_ptr: tl.tensor,
    pairs_a_row: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_tiles: tl.tensor,
    num_features: tl.constexpr,
    split_features: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_c: tl.constexpr,
    block_d: tl.constexpr,
    a_dtype: tl.constexpr,
) -> None:
    split = tl.program_id(1)
    begin = split * split_features
    end = min(begin + split_features, num_features)
    d = tl.arange(0, block_d)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
        if expert >= 0:
            record = record_of(slot_of_tile_ptr, tile, record_ptr)
            if record != 0:
                pair = pairs_of_tile(tile, pair_ptr, start_ptr, tile_pairs)
                there = (pair >= 0)[:, None]
                rank, groups = rank_of(record), field(record, 4).to(tl.int32)
                columns = rank * groups
                a_ptr = tl.multiple_of((record + field(record, 0)).to(tl.pointer_type(a_dtype)), 16)
                a_ptr += expert * columns * num_features
                scale_ptr = (record + field(record, 2)).to(tl.pointer_type(tl.float32)) + expert * groups
                x_row = x_ptr + (pair // pairs_a_row)[:, None] * num_features
                p_row = p_ptr + (split.to(tl.int64) * num_pairs + pair[:, None]) * num_columns
                for first in tl.range(0, columns, block_c):
                    c = first + tl.arange(0, block_c)
                    inside = (c < columns)[None, :]
                    a_row = a_ptr + c.to(tl.int64)[None, :] * num_features
                    acc = tl.zeros((tile_pairs, block_c), dtype=tl.float32)
                    for first_d in tl.range(begin, end, block_d):
                        column = first_d + d
                        x = tl.load(x_row + column[None, :], mask=there & (column < end)[None, :], other=0.0)
                        a = tl.load(a_row + column[:, None], mask=inside & (column < end)[:, None], other=0.0)
                        acc = tl.dot(x.to(a.dtype), a, acc, input_precision="ieee")
                    scale = tl.load(scale_ptr + c // rank, mask=c < columns, other=0.0)
                    tl.store(p_row + c[None, :], acc * scale[None, :], mask=there & inside)


@jit(do_not_specialize=["record_ptr", "num_pairs", "num_columns", "num_tiles"])
def _expand_kernel(
    p_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    slot_of_tile_ptr: tl.tensor,
    start_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    record_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_tiles: tl.tensor,
    num_splits: tl.constexpr,
    num_outputs: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_o: tl.constexpr,
    block_r: tl.constexpr,
    b_dtype: tl.constexpr,
) -> None:
    o = tl.program_id(1) * block_o + tl.arange(0, block_o)
    inside = (o < num_outputs)[None, :]
    num_columns = num_columns // 16 * 16  # the same number, but the compiler knows that it is a multiple of 16
    split_stride = num_pairs.to(tl.int64) * num_columns
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
        if expert >= 0:
            record = record_of(slot_of_tile_ptr, tile, record_ptr)
            if record != 0:
                pair = pairs_of_tile(tile, pair_ptr, start_ptr, tile_pairs)
                there = (pair >= 0)[:, None]
                rank = rank_of(record)
                b_row = b_of(record, b_dtype) + (expert * num_outputs + o)[None, :] * rank
                acc = tl.zeros((tile_pairs, block_o), dtype=tl.float32)
                p_row = p_ptr + pair[:, None] * num_columns
                acc = add_expanded(acc, p_row, there, b_row, inside, rank, split_stride, num_splits, block_r)
                delta = delta_ptr + pair[:, None] * num_outputs + o[None, :]
                tl.store(delta, acc.to(delta_ptr.dtype.element_ty), mask=there & inside)


def shrink_experts(x: Tensor, num_pairs: int, tiles: AdapterTiles, adapters: StepExperts) -> Tensor:
    """Returns P [K, N, C]. x is [T, D] or [N, D], and contiguous."""
    assert x.is_contiguous()
    num_features = x.shape[1]
    splits = min(MAX_SPLITS, triton.cdiv(num_features, SPLIT_FEATURES)) if tiles.tile_pairs < LARGE_TILE else 1
    p_KNC = torch.empty(splits, num_pairs, adapters.columns, dtype=torch.float32, device=x.device)
    block_d = SHRINK_D * 2 // x.dtype.itemsize
    _shrink_kernel[(min(tiles.num_tiles, MOST_PROGRAMS), splits)](
        x,
        p_KNC,
        tiles.expert_L,
        tiles.slot_L,
        tiles.start_L,
        tiles.pair_MB,
        adapters.record_S,
        num_pairs // len(x),
        num_pairs,
        adapters.columns,
        tiles.num_tiles,
        num_features=num_features,
        split_features=triton.cdiv(triton.cdiv(num_features, splits), block_d) * block_d,
        tile_pairs=tiles.tile_pairs,
        block_c=block_of_ranks(adapters),
        block_d=block_d,
        a_dtype=TRITON_DTYPES[adapters.dtype],
        num_warps=4,
        num_stages=3,
    )
    return p_KNC


def expand_experts(
    p_KNC: Tensor, num_outputs: int, dtype: torch.dtype, tiles: AdapterTiles, adapters: StepExperts
) -> Tensor:
    """Returns the adapters' additions to a linear of one group, [N, O]. Rows without an adapter are not written."""
    splits, num_pairs, num_columns = p_KNC.shape
    delta_NO = torch.empty(num_pairs, num_outputs, dtype=dtype, device=p_KNC.device)
    _expand_kernel[(min(tiles.num_tiles, MOST_PROGRAMS), triton.cdiv(num_outputs, EXPAND_O))](
        p_KNC,
        delta_NO,
        tiles.expert_L,
        tiles.slot_L,
        tiles.start_L,
        tiles.pair_MB,
        adapters.record_S,
        num_pairs,
        num_columns,
        tiles.num_tiles,
        num_splits=splits,
        num_outputs=num_outputs,
        tile_pairs=tiles.tile_pairs,
        block_o=EXPAND_O,
        block_r=block_of_ranks(adapters),
        b_dtype=TRITON_DTYPES[adapters.dtype],
        num_warps=8 if tiles.tile_pairs >= LARGE_TILE else 4,
    )
    return delta_NO


def block_of_ranks(adapters: StepExperts) -> int:
    """Returns the number of columns of P, and of ranks, that a program processes at a time."""
    return MIN_BLOCK_C if adapters.max_rank <= MIN_BLOCK_C else MAX_BLOCK_C
