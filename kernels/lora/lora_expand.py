"""Triton kernel for what every token's own adapter adds to a packed linear: delta = B[slot] @ P (and a bias).

Idea: one program takes one tile (tokens of one slot) and a span of output columns of one slice. It sums shrink's
splits once, then walks the span in blocks, and loads the next block of B while it multiplies this one: small programs
would spend their time on the chain tile, address, B. With `early`, it starts beside the shrink (programmatic dependent
launch) and has its first block of B when P is ready. Each output belongs to exactly one program, so no atomics are
needed and every run gives the same bits, however long the span is. The arithmetic is as wide as the slot's own rank.

Memory:
- delta [T, O] holds the slices side by side. Every row is written: base tokens, and slices without an adapter, get
  zeros (or the bias), so whoever adds delta needs no check.
- P has the layout that kernels/lora/lora_shrink.py describes: its splits or, if A's rows are divided over the ranks of
  a tensor-parallel group, the gathered parts of all ranks.
- B [out, rank] of each slice is row-major and unpadded at the address in the tile's table row. A rank that is a
  multiple of 16 gets vector loads.
- FP8 weights become fp16, or delta's fp32, in registers. The shrink has put their scales into P.

Source: SGMV, Punica, arXiv 2310.18547.
"""

# T tokens in the step · O out · R rank · C columns of P · K splits of shrink

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.lora_batch import CHUNK_RANKS, LoRABatch
from lorafleet.kernels.lora.lora_shrink import chunk_of, columns_of
from lorafleet.kernels.lora.packed_lora import MAX_SLICES, PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8

MAX_BLOCK_R = 64  # ranks whose P a program holds; larger adapters take more than one round per block
MAX_BLOCKS = 32  # blocks of a span


@jit()
def _sum_p(
    p_row: tl.tensor,
    r: tl.tensor,
    rank: tl.tensor,
    token_mask: tl.tensor,
    split_stride: tl.tensor,
    num_splits: tl.constexpr,
    num_parts: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """Returns the sum of P's splits, or the gathered parts of P, in fp32."""
    if num_parts > 1:
        size = max(tl.cdiv(rank, num_parts), 1)  # avoids division by zero if the adapter leaves the slice alone
        p_tile = p_row + (r // size * split_stride + r % size)[None, :]
        p = tl.load(p_tile, mask=token_mask & (r < rank)[None, :], other=0.0)
    else:
        mask = tl.max_constancy(token_mask & (r // chunk * chunk < rank)[None, :], [1, chunk])
        p_tile = tl.max_contiguous(tl.multiple_of(p_row + r[None, :], [1, 16]), [1, chunk])
        p = tl.load(p_tile, mask=mask, other=0.0)
        for k in tl.static_range(1, num_splits):
            p_tile = tl.max_contiguous(tl.multiple_of(p_row + k * split_stride + r[None, :], [1, 16]), [1, chunk])
            p += tl.load(p_tile, mask=mask, other=0.0)
    return p


@jit()
def _largest(p: tl.tensor) -> tl.tensor:
    """Returns the largest magnitude of each row, [tokens, 1]. It is never zero."""
    return tl.maximum(tl.max(tl.abs(p), axis=1), 1e-30)[:, None]


@jit()
def _load_b(
    b_ptr: tl.tensor, r: tl.tensor, rank: tl.tensor, first_output: tl.tensor, end: tl.tensor, block_o: tl.constexpr
) -> tl.tensor:
    o = first_output + tl.arange(0, block_o)
    b_tile = b_ptr + o[None, :].to(tl.int64) * rank + r[:, None]
    return tl.load(b_tile, mask=(o < end)[None, :] & (r < rank)[:, None], other=0.0)


@jit()
def _store_span(
    p_row: tl.tensor,
    delta_row: tl.tensor,
    b_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rank: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    token_mask: tl.tensor,
    split_stride: tl.tensor,
    num_splits: tl.constexpr,
    num_parts: tl.constexpr,
    chunk: tl.constexpr,
    block_r: tl.constexpr,
    block_o: tl.constexpr,
    large: tl.constexpr,
    with_bias: tl.constexpr,
    early: tl.constexpr,
) -> None:
    dtype: tl.constexpr = delta_row.dtype.element_ty
    # One instruction converts two e4m3 numbers to fp16; bf16 costs more. P may exceed the range of fp16, so each of its
    # rows is divided by its largest magnitude first.
    in_fp16: tl.constexpr = b_ptr.dtype.element_ty == tl.float8e4nv and dtype != tl.float32
    operand: tl.constexpr = tl.float16 if in_fp16 else dtype
    r = tl.arange(0, block_r)
    b = _load_b(b_ptr, r, rank, begin, end, block_o)
    if early:
        gdc_wait()
    p = _sum_p(p_row, r, rank, token_mask, split_stride, num_splits, num_parts, chunk)
    if in_fp16:
        largest = _largest(p)
        p /= largest
    p = p.to(operand)
    for first_output in tl.range(begin, end, block_o, num_stages=1):
        b_next = _load_b(b_ptr, r, rank, first_output + block_o, end, block_o)
        acc = tl.dot(p, b.to(operand), input_precision="ieee")
        if in_fp16:
            acc *= largest
        if large:
            for first in tl.range(block_r, rank, block_r, num_stages=1):
                more = _sum_p(p_row, first + r, rank, token_mask, split_stride, num_splits, num_parts, chunk)
                if in_fp16:
                    largest_more = _largest(more)
                    more /= largest_more
                more = more.to(operand)
                b_more = _load_b(b_ptr, first + r, rank, first_output, end, block_o).to(operand)
                if in_fp16:
                    acc += tl.dot(more, b_more) * largest_more
                else:
                    acc = tl.dot(more, b_more, acc, input_precision="ieee")
        o = first_output + tl.arange(0, block_o)
        if with_bias:
            acc += tl.load(bias_ptr + o, mask=o < end, other=0.0).to(tl.float32)[None, :]
        tl.store(delta_row + o[None, :], acc.to(dtype), mask=token_mask & (o < end)[None, :])
        b = b_next


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["linear", "split_stride", "num_columns"])
def _expand_kernel(
    p_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    address_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    linear: tl.tensor,
    out_0: tl.tensor,
    out_1: tl.tensor,
    out_2: tl.tensor,
    split_stride: tl.tensor,
    num_columns: tl.tensor,
    span: tl.tensor,
    num_splits: tl.constexpr,
    num_parts: tl.constexpr,
    address_stride: tl.constexpr,
    rank_stride: tl.constexpr,
    tile_tokens: tl.constexpr,
    chunk: tl.constexpr,
    block_r: tl.constexpr,
    narrow_o: tl.constexpr,
    block_o: tl.constexpr,
    large: tl.constexpr,
    with_bias: tl.constexpr,
    early: tl.constexpr,
    fp8: tl.constexpr,
) -> None:
    # Neighboring programs take neighboring columns of the same rows, so that delta is written as whole rows.
    tile = tl.program_id(1)
    index = tl.program_id(0)
    # Find the slice that this span belongs to: each slice has its own whole number of spans.
    spans_0 = tl.cdiv(out_0, span)
    spans_1 = tl.cdiv(out_1, span)
    row = linear * tl.num_programs(1) + tile
    rank_row = rank_ptr + row * rank_stride
    slice_index = 0
    p_column = 0
    delta_column = 0
    out = out_0
    if index >= spans_0:
        slice_index = 1
        p_column = columns_of(tl.load(rank_row), num_parts, chunk)
        delta_column = out_0
        out = out_1
        index -= spans_0
        if index >= spans_1:
            slice_index = 2
            p_column += columns_of(tl.load(rank_row + 1), num_parts, chunk)
            delta_column += out_1
            out = out_2
            index -= spans_1
    b_address = tl.multiple_of(tl.load(address_ptr + row * address_stride + 1 + slice_index), 16)
    b_dtype: tl.constexpr = tl.float8e4nv if fp8 else delta_ptr.dtype.element_ty
    b_ptr = tl.multiple_of(b_address.to(tl.pointer_type(b_dtype)), 16)
    rank = tl.load(rank_row + slice_index)
    token = tl.load(tokens_ptr + tile * tile_tokens + tl.arange(0, tile_tokens)).to(tl.int64)
    token_mask = (token >= 0)[:, None]
    if tl.load(tokens_ptr + tile * tile_tokens) < 0:
        return
    begin = index * span
    end = min(begin + span, out)
    delta_row = delta_ptr + token[:, None] * (out_0 + out_1 + out_2) + delta_column
    bias_row = bias_ptr + delta_column if with_bias else bias_ptr
    p_row = p_ptr + token[:, None] * num_columns + p_column
    # The same number, but the compiler knows that it is a multiple of 16. tl.multiple_of(rank, 16) would mark the load
    # of rank itself, so the other branches would assume it too.
    rank_16 = rank // 16 * 16
    if rank_16 != rank:
        _store_span(
            p_row, delta_row, b_ptr, bias_row, rank, begin, end, token_mask, split_stride,
            num_splits, num_parts, chunk, block_r, block_o, large, with_bias, early,
        )  # fmt: skip
    elif rank <= 16:
        _store_span(
            p_row, delta_row, b_ptr, bias_row, rank_16, begin, end, token_mask, split_stride,
            num_splits, num_parts, chunk, 16, narrow_o, False, with_bias, early,
        )  # fmt: skip
    elif block_r > 16:
        _store_span(
            p_row, delta_row, b_ptr, bias_row, rank_16, begin, end, token_mask, split_stride,
            num_splits, num_parts, chunk, block_r, block_o, large, with_bias, early,
        )  # fmt: skip


def expand(p_KTC: Tensor, packed: PackedLoRA, batch: LoRABatch, dtype: torch.dtype, bias_O: Tensor | None) -> Tensor:
    """Returns B[slot[t]] @ sum over K of P[k, t] + bias, [T, O], for this rank's rows of B.

    p is what shrink() returned for the batch, or what exchanged_splits() made of it. Base tokens' rows are the bias,
    or zero.
    """
    splits, rows, columns = p_KTC.shape
    num_parts = packed.layout.num_parts
    assert splits == num_parts or not packed.layout.exchanges
    total = sum(packed.out_features)
    assert bias_O is None or (bias_O.shape == (total,) and bias_O.is_contiguous())
    delta_TO = torch.empty(batch.num_tokens, total, dtype=dtype, device=p_KTC.device)
    if total == 0:  # if there are many ranks, the last may have no part of a small output
        return delta_TO
    outs = packed.out_features + (0,) * (MAX_SLICES - len(packed.out_features))
    tiles, shape = batch.num_tiles, batch.tuning.expand
    rank = packed.max_total_rank(batch.slots) if batch.max_rank is None else batch.max_rank
    block_r = min(MAX_BLOCK_R, max(CHUNK_RANKS, triton.next_power_of_2(rank)))
    block_o = max(32, shape.elements // block_r)
    narrow_o = shape.elements // 16
    blocks = tiles * total // (narrow_o * shape.programs)
    span = narrow_o * max(1, min(MAX_BLOCKS, blocks))
    # `early` is legal only if the shrink comes right before on the same stream.
    early = shape.early and not packed.layout.exchanges
    launch = {"launch_pdl": True} if early else {}
    _expand_kernel[(sum(triton.cdiv(out, span) for out in packed.out_features), tiles)](
        p_KTC,
        delta_TO,
        bias_O,
        batch.addresses.tables.address_LKA,
        batch.addresses.tables.rank_LKP,
        batch.plan.tokens_KM,
        packed.index,
        *outs,
        rows * columns,
        columns,
        span,
        num_splits=splits // num_parts,
        num_parts=num_parts,
        address_stride=1 + MAX_SLICES,
        rank_stride=MAX_SLICES,
        tile_tokens=batch.tile_tokens,
        chunk=chunk_of(packed.layout),
        block_r=block_r,
        narrow_o=narrow_o,
        block_o=block_o,
        large=rank > MAX_BLOCK_R,
        with_bias=bias_O is not None,
        early=early,
        fp8=packed.dtype == FP8,
        num_warps=shape.warps,
        **launch,
    )
    return delta_TO
