"""Triton kernel that applies every token's own LoRA A and scale: P = scale * A[slot] @ x, for one packed linear.

Idea: one program takes one tile (tokens of one slot) and one split of the input features, so that a single decode
token does not walk all of D in one program. Each split stores its own partial sum, and the reader of P adds them in
order, so no atomics are needed and every run gives the same bits. The number of splits depends on D alone: a token's
result does not depend on the rest of the batch. The width of a program's arithmetic follows the slot's own rank, not
the largest allowed rank. FP8 weights become x's dtype in registers, and each column of P is also multiplied by its
row's own scale.

Memory:
- x [T, D]: a tile's tokens need not lie together; their rows are gathered.
- A [rank, D] is row-major at the address in the tile's table row. Rows past the slot's own rank are not read. Behind
  an FP8 A, at the next multiple of 16 bytes, lies one float32 scale for each row.
- P [K, T, C] is fp32, and row t is token t. A slice's columns start at a multiple of CHUNK_RANKS and are zero between
  its rank and the next multiple. Columns past the slot's last slice, and base tokens' rows, are never written or read.
- If A's rows are divided over the ranks of a tensor-parallel group (kernels/lora/lora_layout.py), a slice has the
  columns of one part, which are zero where this rank's part is short. It begins at any column, so that fewer bytes are
  gathered.

Source: SGMV, Punica, arXiv 2310.18547.
"""

# T tokens in the step · D in · C columns of P · K splits of D · S slots

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.lora_batch import CHUNK_RANKS, LoRABatch
from lorafleet.kernels.lora.lora_layout import LoRALayout
from lorafleet.kernels.lora.packed_lora import MAX_SLICES, PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8

FEATURES_A_SPLIT = 512  # features of D in a split: a few steps of the loop
MAX_SPLITS = 16
MAX_BLOCK_C = 64  # columns of P that a program computes at a time
MAX_PARTS = 4  # programs that share a split's columns if adapters may have more than MAX_BLOCK_C
SPLIT_STEP = 128  # the number of features in a split is a multiple of this


@jit()
def columns_of(rank: tl.tensor, num_parts: tl.constexpr, chunk: tl.constexpr) -> tl.tensor:
    """Returns the number of columns of P that a slice of this rank occupies."""
    return tl.cdiv(tl.cdiv(rank, num_parts), chunk) * chunk


@jit()
def _rows_of(rank: tl.tensor, num_parts: tl.constexpr, part: tl.constexpr) -> tl.tensor:
    """Returns the number of rows of A that this part has: LoRALayout.num_rows."""
    rows = rank
    if num_parts > 1:
        size = tl.cdiv(rank, num_parts)
        rows = min(max(rank - part * size, 0), size)
    return rows


@jit()
def _shrink_columns(
    x_row: tl.tensor,
    p_row: tl.tensor,
    a_ptr: tl.tensor,
    scale_row: tl.tensor,
    row_scale_ptr: tl.tensor,
    rows_0: tl.tensor,
    rows_1: tl.tensor,
    rows_2: tl.tensor,
    column_1: tl.tensor,
    column_2: tl.tensor,
    columns: tl.tensor,
    mine: tl.tensor,
    num_features: tl.tensor,
    first_feature: tl.tensor,
    end_feature: tl.tensor,
    tile_tokens: tl.constexpr,
    block_c: tl.constexpr,
    block_d: tl.constexpr,
    stages: tl.constexpr,
    fp8: tl.constexpr,
) -> None:
    d = tl.arange(0, block_d)
    for first in tl.range(tl.program_id(2) * block_c, columns, tl.num_programs(2) * block_c, num_stages=1):
        c = first + tl.arange(0, block_c)
        # Column of P -> row of A: slices are padded to whole chunks in P, but not in A.
        index = tl.where(c >= column_2, 2, tl.where(c >= column_1, 1, 0))
        r = c - tl.where(index == 2, column_2, tl.where(index == 1, column_1, 0))
        rows = tl.where(index == 2, rows_2, tl.where(index == 1, rows_1, rows_0))
        a_first = tl.where(index == 2, rows_0 + rows_1, tl.where(index == 1, rows_0, 0))
        own = (r < rows)[None, :]
        a_row = a_ptr + (a_first + r)[None, :].to(tl.int64) * num_features
        scale = tl.load(scale_row + index)
        if fp8:
            scale *= tl.load(row_scale_ptr + a_first + r, mask=r < rows, other=0.0)
        acc = tl.zeros((tile_tokens, block_c), dtype=tl.float32)
        for first_d in tl.range(first_feature, end_feature, block_d, num_stages=stages):
            inside = first_d + d < num_features
            x = tl.load(x_row + (first_d + d)[None, :], mask=mine & inside[None, :], other=0.0)
            a = tl.load(a_row + (first_d + d)[:, None], mask=own & inside[:, None], other=0.0)
            acc = tl.dot(x, a.to(x.dtype), acc, input_precision="ieee")
        tl.store(p_row + c[None, :], acc * scale[None, :], mask=mine & (c < columns)[None, :])


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["linear", "num_tokens", "num_columns"])
def _shrink_kernel(
    x_ptr: tl.tensor,
    p_ptr: tl.tensor,
    address_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    linear: tl.tensor,
    num_features: tl.tensor,
    num_tokens: tl.tensor,
    num_columns: tl.tensor,
    split_features: tl.tensor,
    address_stride: tl.constexpr,
    rank_stride: tl.constexpr,
    tile_tokens: tl.constexpr,
    chunk: tl.constexpr,
    num_parts: tl.constexpr,
    part: tl.constexpr,
    most_columns: tl.constexpr,
    narrow_d: tl.constexpr,
    narrow_stages: tl.constexpr,
    wide_d: tl.constexpr,
    wide_stages: tl.constexpr,
    fp8: tl.constexpr,
    dependent: tl.constexpr,
) -> None:
    if dependent:  # the expand may begin: it waits for this kernel before it reads P
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = linear * tl.num_programs(0) + tile
    rank_row = rank_ptr + row * rank_stride
    rank_0 = tl.load(rank_row)
    rank_1 = tl.load(rank_row + 1)
    rank_2 = tl.load(rank_row + 2)
    rows_0 = _rows_of(rank_0, num_parts, part)
    rows_1 = _rows_of(rank_1, num_parts, part)
    rows_2 = _rows_of(rank_2, num_parts, part)
    column_1 = columns_of(rank_0, num_parts, chunk)
    column_2 = column_1 + columns_of(rank_1, num_parts, chunk)
    columns = column_2 + columns_of(rank_2, num_parts, chunk)
    a_address = tl.multiple_of(tl.load(address_ptr + row * address_stride), 16)
    a_dtype: tl.constexpr = tl.float8e4nv if fp8 else x_ptr.dtype.element_ty
    a_ptr = tl.multiple_of(a_address.to(tl.pointer_type(a_dtype)), 16)
    m = tl.arange(0, tile_tokens)
    token = tl.load(tokens_ptr + tile * tile_tokens + m).to(tl.int64)
    mine = (token >= 0)[:, None]
    x_row = x_ptr + token[:, None] * num_features
    p_row = p_ptr + (split.to(tl.int64) * num_tokens + token[:, None]) * num_columns
    scale_row = scale_ptr + row * rank_stride
    row_scale_ptr = scale_row
    if fp8:
        a_bytes = (rows_0 + rows_1 + rows_2).to(tl.int64) * num_features
        row_scale_ptr = (a_address + tl.cdiv(a_bytes, 16) * 16).to(tl.pointer_type(tl.float32))
    first_feature = split * split_features
    end_feature = min(first_feature + split_features, num_features)
    if columns == 0:
        return
    if columns <= 16:
        _shrink_columns(
            x_row, p_row, a_ptr, scale_row, row_scale_ptr, rows_0, rows_1, rows_2, column_1, column_2, columns, mine,
            num_features, first_feature, end_feature, tile_tokens, 16, narrow_d, narrow_stages, fp8,
        )  # fmt: skip
    elif most_columns > 16:  # known at compile time: if all adapters are narrow, only one branch is compiled
        _shrink_columns(
            x_row, p_row, a_ptr, scale_row, row_scale_ptr, rows_0, rows_1, rows_2, column_1, column_2, columns, mine,
            num_features, first_feature, end_feature, tile_tokens, most_columns, wide_d, wide_stages, fp8,
        )  # fmt: skip


def num_splits(in_features: int) -> int:
    return min(MAX_SPLITS, -(-in_features // FEATURES_A_SPLIT))


def chunk_of(layout: LoRALayout) -> int:
    """Returns the number of columns of P of which each slice's first column is a multiple.

    Gathered columns are read one by one, so padding would gain nothing there.
    """
    return CHUNK_RANKS if layout.num_parts == 1 else 1


def num_columns(packed: PackedLoRA, batch: LoRABatch) -> int:
    """Returns the number of columns of P.

    It is the same for every content of a static batch, and on all ranks that exchange P.
    """
    num_slices, layout = len(packed.out_features), packed.layout
    chunk = chunk_of(layout)
    if batch.max_rank is not None:
        return num_slices * _rounded_up(layout.columns(batch.max_rank), chunk)
    total = layout.columns(packed.max_total_rank(batch.slots))
    # Each further slice may round up once more, to whole parts and to whole chunks.
    return _rounded_up(total, chunk) + (num_slices - 1) * chunk


def _rounded_up(columns: int, chunk: int) -> int:
    return -(-columns // chunk) * chunk


def shrink(x_TD: Tensor, packed: PackedLoRA, batch: LoRABatch) -> Tensor:
    """Returns partial sums of scale * A[slot] @ x for the tokens with an adapter, for this rank's rows of A.

    The result is fp32 [K, T, C] in the layout that the top of this file describes. Slots are not checked here, since
    checking would synchronize the GPU: LoRAModelManager.activate checks a slot before it is used.
    """
    assert x_TD.is_contiguous()
    assert x_TD.shape == (batch.num_tokens, packed.in_features)
    splits, columns = num_splits(packed.in_features), num_columns(packed, batch)
    p_KTC = torch.empty(splits, batch.num_tokens, columns, dtype=torch.float32, device=x_TD.device)
    tables, shape = batch.addresses.tables, batch.tuning.shrink
    most_columns = min(MAX_BLOCK_C, max(CHUNK_RANKS, triton.next_power_of_2(columns)))
    parts = min(MAX_PARTS, triton.cdiv(columns, most_columns))
    assert SPLIT_STEP % shape.narrow_d == 0 and SPLIT_STEP % shape.wide_d == 0
    _shrink_kernel[(batch.num_tiles, splits, parts)](
        x_TD,
        p_KTC,
        tables.address_LKA,
        tables.rank_LKP,
        tables.scale_LKP,
        batch.plan.tokens_KM,
        packed.index,
        packed.in_features,
        batch.num_tokens,
        columns,
        triton.cdiv(triton.cdiv(packed.in_features, splits), SPLIT_STEP) * SPLIT_STEP,
        address_stride=1 + MAX_SLICES,
        rank_stride=MAX_SLICES,
        tile_tokens=batch.tile_tokens,
        chunk=chunk_of(packed.layout),
        num_parts=packed.layout.num_parts,
        part=packed.layout.part,
        most_columns=most_columns,
        narrow_d=shape.narrow_d,
        narrow_stages=shape.narrow_stages,
        wide_d=shape.wide_d,
        wide_stages=shape.wide_stages,
        fp8=packed.dtype == FP8,
        dependent=batch.tuning.expand.early and not packed.layout.exchanges,
        num_warps=shape.warps,
    )
    return p_KTC
