"""The adapters' additions to a mixture's linear on the GPU, for all pairs of a step and any mix of adapters in two
launches. kernels/moe/moe_torch.py has the twin.

Idea: shrink writes P = scale * A x with each pair's own adapter; a program takes one tile of an expert's pairs and one
split of D. expand adds the splits in order and multiplies by B; a program takes one tile and one block of outputs.
Both process a tile's slots one after the other, and mask the rows of the other slots. A tile has few slots, since the
tokens of a prompt follow each other.

Memory: P [K, N, C] is fp32, with C as in kernels/moe/expert_lora.py. Columns that no adapter has are neither written
nor read. A and B lie at the offsets in the slot's record. delta [N, O] has x's dtype, with zeros where a pair's
adapter has nothing.
"""

# N pairs · D in · O out · K splits of D · C columns of P

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.expert_lora import StepExperts
from lorafleet.kernels.moe.moe_tiles_triton import ExpertTiles

SPLIT_FEATURES = 512  # features of D in a split of the shrink
MAX_SPLITS = 8
SHRINK_D = 128  # features that a program processes at a time, in half precision
EXPAND_O = 128
MIN_BLOCK_C, MAX_BLOCK_C = 16, 32
NO_SLOT = tl.constexpr(1 << 30)
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@jit()
def _least_slot(slots: tl.tensor) -> tl.tensor:
    """Returns the smallest slot that is left, or NO_SLOT if there is none."""
    return tl.min(tl.where(slots >= 0, slots, NO_SLOT), 0)


@jit()
def _pairs_and_slots(
    tile: tl.tensor, pair_ptr: tl.tensor, slot_ptr: tl.tensor, pairs_a_token: tl.tensor, tile_pairs: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns the tile's pairs and their slots. They are -1 where the tile has fewer pairs, or a pair has no
    adapter."""
    pair = tl.load(pair_ptr + tile * tile_pairs + tl.arange(0, tile_pairs)).to(tl.int64)
    return pair, tl.load(slot_ptr + pair // pairs_a_token, mask=pair >= 0, other=-1)


@jit()
def _field(record: tl.tensor, number: tl.constexpr) -> tl.tensor:
    return tl.load(record.to(tl.pointer_type(tl.int64)) + number)


@jit()
def _rank_and_groups(record: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return tl.multiple_of(_field(record, 3).to(tl.int32), 8), _field(record, 4).to(tl.int32)


# Slots and records begin anywhere in larger tensors: their alignment must not cause another compilation.
@jit(do_not_specialize=["slot_ptr", "record_ptr", "pairs_a_row", "pairs_a_token", "num_pairs", "num_columns"])
def _shrink_kernel(
    x_ptr: tl.tensor,
    p_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    record_ptr: tl.tensor,
    pairs_a_row: tl.tensor,
    pairs_a_token: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_features: tl.constexpr,
    split_features: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_c: tl.constexpr,
    block_d: tl.constexpr,
    a_dtype: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    split = tl.program_id(1)
    pair, slots = _pairs_and_slots(tile, pair_ptr, slot_ptr, pairs_a_token, tile_pairs)
    d = tl.arange(0, block_d)
    x_row = x_ptr + (pair // pairs_a_row)[:, None] * num_features
    p_row = p_ptr + (split.to(tl.int64) * num_pairs + pair[:, None]) * num_columns
    end = min((split + 1) * split_features, num_features)
    slot = _least_slot(slots)
    while slot < NO_SLOT:
        record = tl.load(record_ptr + slot)
        if record != 0:
            rank, groups = _rank_and_groups(record)
            columns = rank * groups
            a_ptr = tl.multiple_of(record + _field(record, 0), 16).to(tl.pointer_type(a_dtype))
            a_ptr += expert * columns * num_features
            scale_ptr = (record + _field(record, 2)).to(tl.pointer_type(tl.float32)) + expert * groups
            own = (slots == slot)[:, None]
            for first in tl.range(0, columns, block_c):
                c = first + tl.arange(0, block_c)
                inside = (c < columns)[None, :]
                a_row = a_ptr + c.to(tl.int64)[None, :] * num_features
                acc = tl.zeros((tile_pairs, block_c), dtype=tl.float32)
                for first_d in tl.range(split * split_features, end, block_d):
                    there = first_d + d < end
                    x = tl.load(x_row + (first_d + d)[None, :], mask=own & there[None, :], other=0.0)
                    a = tl.load(a_row + (first_d + d)[:, None], mask=inside & there[:, None], other=0.0)
                    acc = tl.dot(x.to(a.dtype), a, acc, input_precision="ieee")
                scale = tl.load(scale_ptr + c // rank, mask=c < columns, other=0.0)
                tl.store(p_row + c[None, :], acc * scale[None, :], mask=own & inside)
        slots = tl.where(slots == slot, -1, slots)
        slot = _least_slot(slots)


@jit(do_not_specialize=["slot_ptr", "record_ptr", "pairs_a_token", "num_pairs", "num_columns"])
def _expand_kernel(
    p_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    record_ptr: tl.tensor,
    pairs_a_token: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_splits: tl.constexpr,
    num_outputs: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_o: tl.constexpr,
    block_r: tl.constexpr,
    b_dtype: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    first_output = tl.program_id(1) * block_o
    o = first_output + tl.arange(0, block_o)
    pair, slots = _pairs_and_slots(tile, pair_ptr, slot_ptr, pairs_a_token, tile_pairs)
    acc = tl.zeros((tile_pairs, block_o), dtype=tl.float32)
    slot = _least_slot(slots)
    while slot < NO_SLOT:
        record = tl.load(record_ptr + slot)
        if record != 0:
            rank, groups = _rank_and_groups(record)
            b_ptr = tl.multiple_of(record + _field(record, 1), 16).to(tl.pointer_type(b_dtype))
            b_row = b_ptr + (expert * num_outputs + o)[None, :] * rank
            own = (slots == slot)[:, None]
            outputs = num_outputs // groups
            # Take the groups that have outputs in this block: usually one.
            for group in tl.range(first_output // outputs, min(groups, tl.cdiv(first_output + block_o, outputs))):
                its = (o // outputs == group) & (o < num_outputs)
                for first in tl.range(0, rank, block_r):
                    r = first + tl.arange(0, block_r)
                    p_row = p_ptr + pair[:, None] * num_columns + (group * rank + r)[None, :]
                    p = tl.zeros((tile_pairs, block_r), dtype=tl.float32)
                    for split in tl.static_range(num_splits):
                        p_offset = p_row + num_pairs.to(tl.int64) * num_columns * split
                        p += tl.load(p_offset, mask=own & (r < rank)[None, :], other=0.0)
                    b = tl.load(b_row + r[:, None], mask=its[None, :] & (r < rank)[:, None], other=0.0)
                    acc = tl.dot(p.to(b.dtype), b, acc, input_precision="ieee")
        slots = tl.where(slots == slot, -1, slots)
        slot = _least_slot(slots)
    delta_ptrs = delta_ptr + pair[:, None] * num_outputs + o[None, :]
    tl.store(delta_ptrs, acc.to(delta_ptr.dtype.element_ty), mask=(pair >= 0)[:, None] & (o < num_outputs)[None, :])


def expert_delta(x: Tensor, num_outputs: int, num_pairs: int, tiles: ExpertTiles, adapters: StepExperts) -> Tensor:
    """Returns the adapters' additions, [N, O]. x is [T, D] or [N, D], and contiguous."""
    p_KNC = _shrunk(x, num_pairs, tiles, adapters)
    delta_NO = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    _expand_kernel[(tiles.num_tiles, triton.cdiv(num_outputs, EXPAND_O))](
        p_KNC,
        delta_NO,
        tiles.expert_M,
        tiles.pair_MB,
        adapters.slot_T,
        adapters.record_S,
        num_pairs // len(adapters.slot_T),
        num_pairs,
        p_KNC.shape[2],
        num_splits=len(p_KNC),
        num_outputs=num_outputs,
        tile_pairs=tiles.tile_pairs,
        block_o=EXPAND_O,
        block_r=_block_c(adapters),
        b_dtype=TRITON_DTYPES[adapters.dtype],
        num_warps=4,
    )
    return delta_NO


def _shrunk(x: Tensor, num_pairs: int, tiles: ExpertTiles, adapters: StepExperts) -> Tensor:
    """Returns P [K, N, C], the shrink's result."""
    num_features = x.shape[1]
    splits = min(MAX_SPLITS, triton.cdiv(num_features, SPLIT_FEATURES))
    p_KNC = torch.empty(splits, num_pairs, adapters.columns, dtype=torch.float32, device=x.device)
    block_d = SHRINK_D * 2 // x.dtype.itemsize
    _shrink_kernel[(tiles.num_tiles, splits)](
        x,
        p_KNC,
        tiles.expert_M,
        tiles.pair_MB,
        adapters.slot_T,
        adapters.record_S,
        num_pairs // len(x),
        num_pairs // len(adapters.slot_T),
        num_pairs,
        adapters.columns,
        num_features=num_features,
        split_features=triton.cdiv(triton.cdiv(num_features, splits), block_d) * block_d,
        tile_pairs=tiles.tile_pairs,
        block_c=_block_c(adapters),
        block_d=block_d,
        a_dtype=TRITON_DTYPES[adapters.dtype],
        num_warps=4,
        num_stages=3,
    )
    return p_KNC


def _block_c(adapters: StepExperts) -> int:
    """Returns the number of columns of P, and of ranks, that a program processes at a time."""
    return MIN_BLOCK_C if adapters.max_rank <= MIN_BLOCK_C else MAX_BLOCK_C
