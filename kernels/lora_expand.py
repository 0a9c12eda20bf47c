"""Triton expand: adds every token's own B[slot] @ P to a packed linear's output, in place.

Idea: one program takes one tile (tokens of one slot) and a span of output columns of one slice. It sums shrink's splits
once, then walks the span in blocks with B and y of the next ones already on their way: small programs would spend their
time on the chain tile, slot, address, B. It adds to y in fp32 and rounds once. Each output belongs to exactly one
program, so no atomics and the same bits on every run, however long the span.

Memory: y [T, O] holds the slices side by side; rows are reached through order_T. P as kernels/lora_shrink.py lays it
out. B [out, rank] of each slice is row-major at the address that the slot's table row holds, without padding; a rank
that is a multiple of 16 gets vector loads. A slice that the adapter leaves alone (rank 0), and base tokens' rows, are
not touched.
Source: SGMV, Punica, arXiv 2310.18547.
"""

# T tokens in the step · O out · R rank · C columns of P · K splits of shrink

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.lora_batch import CHUNK_RANKS, LoRABatch
from lorafleet.kernels.packed_lora import MAX_SLICES, PackedLoRA

BLOCK_O = 128
MAX_BLOCK_R = 64  # ranks whose P a program keeps; larger adapters take more than one round a block
PROGRAMS = 1024  # about eight for each multiprocessor of an H200: spans grow until a launch has no more
MAX_BLOCKS = 16  # of a span


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_p(
    p_row: tl.tensor,
    r: tl.tensor,
    rank: tl.tensor,
    token_mask: tl.tensor,
    split_stride: tl.tensor,
    num_splits: tl.constexpr,
    dtype: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    mask = tl.max_constancy(token_mask & (r // chunk * chunk < rank)[None, :], [1, chunk])
    p_tile = tl.max_contiguous(tl.multiple_of(p_row + r[None, :], [1, 16]), [1, chunk])
    p = tl.load(p_tile, mask=mask, other=0.0)
    for k in tl.static_range(1, num_splits):
        p_tile = tl.max_contiguous(tl.multiple_of(p_row + k * split_stride + r[None, :], [1, 16]), [1, chunk])
        p += tl.load(p_tile, mask=mask, other=0.0)
    return p.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _add_span(
    p_row: tl.tensor,
    y_row: tl.tensor,
    b_ptr: tl.tensor,
    rank: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    token_mask: tl.tensor,
    split_stride: tl.tensor,
    num_splits: tl.constexpr,
    chunk: tl.constexpr,
    block_r: tl.constexpr,
    block_o: tl.constexpr,
    stages: tl.constexpr,
    large: tl.constexpr,
) -> None:
    dtype: tl.constexpr = y_row.dtype.element_ty
    r = tl.arange(0, block_r)
    p = _sum_p(p_row, r, rank, token_mask, split_stride, num_splits, dtype, chunk)
    for at in tl.range(begin, end, block_o, num_stages=stages):
        o = at + tl.arange(0, block_o)
        b_row = b_ptr + o[None, :].to(tl.int64) * rank
        b = tl.load(b_row + r[:, None], mask=(o < end)[None, :] & (r < rank)[:, None], other=0.0)
        y = tl.load(y_row + o[None, :], mask=token_mask & (o < end)[None, :], other=0.0)
        acc = tl.dot(p, b, input_precision="ieee")
        if large:  # a loop in here, even an empty one, would keep the outer one from loading ahead
            for first in tl.range(block_r, rank, block_r, num_stages=1):
                rr = first + r
                more = _sum_p(p_row, rr, rank, token_mask, split_stride, num_splits, dtype, chunk)
                b = tl.load(b_row + rr[:, None], mask=(o < end)[None, :] & (rr < rank)[:, None], other=0.0)
                acc = tl.dot(more, b, acc, input_precision="ieee")
        tl.store(y_row + o[None, :], (y.to(tl.float32) + acc).to(dtype), mask=token_mask & (o < end)[None, :])


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@triton.jit(do_not_specialize=["split_stride", "num_columns"])  # type: ignore[untyped-decorator]  # triton has no types
def _expand_kernel(
    p_ptr: tl.tensor,
    y_ptr: tl.tensor,
    address_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_0: tl.tensor,
    out_1: tl.tensor,
    out_2: tl.tensor,
    split_stride: tl.tensor,
    num_columns: tl.tensor,
    span: tl.tensor,
    num_splits: tl.constexpr,
    address_stride: tl.constexpr,
    rank_stride: tl.constexpr,
    tile_tokens: tl.constexpr,
    chunk: tl.constexpr,
    block_r: tl.constexpr,
    block_o: tl.constexpr,
    stages: tl.constexpr,
    large: tl.constexpr,
) -> None:
    # Neighbours take neighbouring columns of the same rows: y is read and written as whole rows.
    tile = tl.program_id(1)
    index = tl.program_id(0)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    length = tl.load(tiles_ptr + tile * 3 + 2)
    if length == 0:
        return

    # Which slice this span belongs to: each slice has its own whole number of spans.
    spans_0 = tl.cdiv(out_0, span)
    spans_1 = tl.cdiv(out_1, span)
    rank_row = rank_ptr + slot * rank_stride
    slice_index = 0
    p_column = 0
    y_column = 0
    out = out_0
    if index >= spans_0:
        slice_index = 1
        p_column = tl.cdiv(tl.load(rank_row), chunk) * chunk
        y_column = out_0
        out = out_1
        index -= spans_0
        if index >= spans_1:
            slice_index = 2
            p_column += tl.cdiv(tl.load(rank_row + 1), chunk) * chunk
            y_column += out_1
            out = out_2
            index -= spans_1
    b_address = tl.multiple_of(tl.load(address_ptr + slot * address_stride + 1 + slice_index), 16)
    b_ptr = tl.multiple_of(b_address.to(tl.pointer_type(y_ptr.dtype.element_ty)), 16)
    rank = tl.load(rank_row + slice_index)
    m = tl.arange(0, tile_tokens)
    token_mask = (m < length)[:, None]
    token = tl.load(order_ptr + start + m, mask=m < length, other=0).to(tl.int64)
    if rank == 0:
        return

    begin = index * span
    end = min(begin + span, out)
    y_row = y_ptr + token[:, None] * (out_0 + out_1 + out_2) + y_column
    p_row = p_ptr + token[:, None] * num_columns + p_column
    if rank % 16 == 0:
        # The same number, but one that the compiler knows to be a multiple of 16. Not tl.multiple_of(rank, 16):
        # that marks the load of rank itself, so the other branch would believe it too.
        rank_16 = rank // 16 * 16
        _add_span(
            p_row, y_row, b_ptr, rank_16, begin, end, token_mask, split_stride,
            num_splits, chunk, block_r, block_o, stages, large,
        )  # fmt: skip
    else:
        _add_span(
            p_row, y_row, b_ptr, rank, begin, end, token_mask, split_stride,
            num_splits, chunk, block_r, block_o, 1, large,
        )  # fmt: skip


def expand(p_KTC: Tensor, y_TO: Tensor, packed: PackedLoRA, batch: LoRABatch) -> None:
    """y[t] += B[slot[t]] @ sum over K of P[k, t], in place; p is what shrink() returned."""
    assert y_TO.is_contiguous()
    assert y_TO.shape == (batch.num_tokens, sum(packed.out_features))
    assert packed.rank_SP.stride() == (MAX_SLICES, 1)
    splits, rows, columns = p_KTC.shape
    outs = packed.out_features + (0,) * (MAX_SLICES - len(packed.out_features))
    plan = batch.plan
    tiles = plan.tiles_K3.shape[0]
    blocks = tiles * sum(outs) // (BLOCK_O * PROGRAMS)
    span = BLOCK_O * max(1, min(MAX_BLOCKS, blocks))
    rank = packed.max_total_rank(batch.slots) if batch.max_rank is None else batch.max_rank
    _expand_kernel[(sum(triton.cdiv(out, span) for out in packed.out_features), tiles)](
        p_KTC,
        y_TO,
        packed.address_SA,
        packed.rank_SP,
        plan.order_T,
        plan.tiles_K3,
        *outs,
        rows * columns,
        columns,
        span,
        num_splits=splits,
        address_stride=1 + MAX_SLICES,
        rank_stride=MAX_SLICES,
        tile_tokens=batch.tile_tokens,
        chunk=CHUNK_RANKS,
        large=rank > MAX_BLOCK_R,
        block_r=min(MAX_BLOCK_R, max(CHUNK_RANKS, triton.next_power_of_2(rank))),
        block_o=BLOCK_O,
        stages=3,
    )
