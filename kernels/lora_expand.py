"""Triton expand: adds every token's own scale * B[slot] @ P to a packed linear's output, in place.

Idea: one program takes one tile (at most TILE_TOKENS tokens of one slot) and BLOCK_O output columns of one slice. It
sums shrink's splits in order, scales in fp32, multiplies by B in steps of BLOCK_R, adds to y in fp32 and rounds once.
Each output belongs to exactly one program, so no atomics and the same bits on every run.

Memory: y [T, O] holds the slices side by side; rows are reached through order_M. B [out, rank] of each slice is
row-major at the address that the slot's table row holds, without padding; a rank that is a multiple of 16 gets vector
loads. A slice that the adapter leaves alone (rank 0), and base tokens' rows, are not touched.
Source: SGMV, Punica, arXiv 2310.18547.
"""

# T tokens in the step · M of them with an adapter · O out · R rank · C columns of P · K splits of shrink

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.lora_batch import TILE_TOKENS, LoRABatch
from lorafleet.kernels.packed_lora import MAX_SLICES, PackedLoRA

BLOCK_R = 16  # tl.dot's least K, so that small ranks waste little
BLOCK_O = 128


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _times_b(
    p_row: tl.tensor,
    b_ptr: tl.tensor,
    o: tl.tensor,
    token_mask: tl.tensor,
    column_mask: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    split_stride: tl.tensor,
    num_splits: tl.constexpr,
    tile_tokens: tl.constexpr,
    block_r: tl.constexpr,
    block_o: tl.constexpr,
) -> tl.tensor:
    acc = tl.zeros((tile_tokens, block_o), dtype=tl.float32)
    for first in range(0, rank, block_r):
        r = first + tl.arange(0, block_r)
        p = tl.zeros((tile_tokens, block_r), dtype=tl.float32)
        for split in tl.static_range(num_splits):
            p += tl.load(p_row + split * split_stride + r[None, :], mask=token_mask & (r < rank)[None, :], other=0.0)
        b = tl.load(
            b_ptr + o[None, :].to(tl.int64) * rank + r[:, None], mask=column_mask & (r < rank)[:, None], other=0.0
        )
        acc = tl.dot((p * scale).to(b.dtype), b, acc, input_precision="ieee")
    return acc


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@triton.jit(do_not_specialize=["split_stride", "num_columns"])  # type: ignore[untyped-decorator]  # triton has no types
def _expand_kernel(
    p_ptr: tl.tensor,
    y_ptr: tl.tensor,
    address_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_0: tl.tensor,
    out_1: tl.tensor,
    out_2: tl.tensor,
    split_stride: tl.tensor,
    num_columns: tl.tensor,
    address_stride: tl.constexpr,
    rank_stride: tl.constexpr,
    num_splits: tl.constexpr,
    tile_tokens: tl.constexpr,
    block_r: tl.constexpr,
    block_o: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    length = tl.load(tiles_ptr + tile * 3 + 2)

    # Which slice this block of columns belongs to: each slice has its own whole number of blocks.
    blocks_0 = tl.cdiv(out_0, block_o)
    blocks_1 = tl.cdiv(out_1, block_o)
    rank_row = rank_ptr + slot * rank_stride
    slice_index = 0
    p_column = 0
    y_column = 0
    out = out_0
    if block >= blocks_0:
        slice_index = 1
        p_column = tl.load(rank_row)
        y_column = out_0
        out = out_1
        block -= blocks_0
        if block >= blocks_1:
            slice_index = 2
            p_column += tl.load(rank_row + 1)
            y_column += out_1
            out = out_2
            block -= blocks_1
    rank = tl.load(rank_row + slice_index)
    if rank == 0:
        return

    b_address = tl.multiple_of(tl.load(address_ptr + slot * address_stride + 1 + slice_index), 16)
    b_ptr = tl.multiple_of(b_address.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
    scale = tl.load(scale_ptr + slot * rank_stride + slice_index)
    m = tl.arange(0, tile_tokens)
    token_mask = (m < length)[:, None]
    o = block * block_o + tl.arange(0, block_o)
    column_mask = (o < out)[None, :]
    p_row = p_ptr + (start + m)[:, None].to(tl.int64) * num_columns + p_column
    if rank % 16 == 0:
        # The same number, but one that the compiler knows to be a multiple of 16. Not tl.multiple_of(rank, 16):
        # that marks the load of rank itself, so the other branch would believe it too.
        rank_16 = rank // 16 * 16
        acc = _times_b(
            p_row,
            b_ptr,
            o,
            token_mask,
            column_mask,
            rank_16,
            scale,
            split_stride,
            num_splits,
            tile_tokens,
            block_r,
            block_o,
        )
    else:
        acc = _times_b(
            p_row,
            b_ptr,
            o,
            token_mask,
            column_mask,
            rank,
            scale,
            split_stride,
            num_splits,
            tile_tokens,
            block_r,
            block_o,
        )
    token = tl.load(order_ptr + start + m, mask=m < length, other=0)
    y_tile = y_ptr + token[:, None] * (out_0 + out_1 + out_2) + y_column + o[None, :]
    y = tl.load(y_tile, mask=token_mask & column_mask, other=0.0).to(tl.float32)
    tl.store(y_tile, (y + acc).to(y_ptr.dtype.element_ty), mask=token_mask & column_mask)


def expand(p_KMC: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """y[t] += scale * B[slot[t]] @ sum over K of P[k, row of t], in place; p is what shrink() returned."""
    assert y_TO.is_contiguous()
    assert y_TO.shape == (batch.num_tokens, sum(packed.out_features))
    assert packed.rank_SP.stride() == packed.scale_SP.stride() == (MAX_SLICES, 1)
    splits, rows, columns = p_KMC.shape
    outs = packed.out_features + (0,) * (MAX_SLICES - len(packed.out_features))
    blocks = sum(triton.cdiv(out, BLOCK_O) for out in packed.out_features)
    _expand_kernel[(batch.tiles_K3.shape[0], blocks)](
        p_KMC,
        y_TO,
        packed.address_SA,
        packed.rank_SP,
        packed.scale_SP,
        batch.order_M,
        batch.tiles_K3,
        *outs,
        rows * columns,
        columns,
        address_stride=1 + MAX_SLICES,
        rank_stride=MAX_SLICES,
        num_splits=splits,
        tile_tokens=TILE_TOKENS,
        block_r=BLOCK_R,
        block_o=BLOCK_O,
    )
