"""Triton shrink: every token's own LoRA A, P = A[slot] @ x, for one packed linear.

Idea: one program takes one tile (at most TILE_TOKENS tokens of one slot), BLOCK_R rows of that slot's stacked A and one
split of the input features. The splits keep a lone decode token from walking all of D in one program; each split
stores its own partial sum and expand adds them in order, so no atomics and the same bits on every run. The number of
splits depends on D alone: a token's result does not depend on who else is in the batch.

Memory: x [T, D] rows are gathered through order_M, so tokens need not lie together. A [rank, D] is row-major at the
address that the slot's table row holds; rows past the slot's own rank are neither read nor written. P [K, M, C] fp32,
row m is token order_M[m]; columns past the slot's rank stay unwritten and are never read.
Source: SGMV, Punica, arXiv 2310.18547.
"""

# T tokens in the step · M of them with an adapter · D in · R rank · C columns of P, the largest total rank of the batch
# K splits of D · S slots · A addresses of a slot

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.lora_batch import TILE_TOKENS, LoRABatch
from lorafleet.kernels.packed_lora import MAX_SLICES, PackedLoRA

BLOCK_R = 32  # rows of A a program takes; one size for every batch keeps the arithmetic the same
BLOCK_D = 128
FEATURES_A_SPLIT = 512  # of D; about four steps of the loop
MAX_SPLITS = 16


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@triton.jit(do_not_specialize=["num_rows", "num_columns"])  # type: ignore[untyped-decorator]  # triton has no types
def _shrink_kernel(
    x_ptr: tl.tensor,
    p_ptr: tl.tensor,
    address_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_features: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    split_features: tl.tensor,
    address_stride: tl.constexpr,
    rank_stride: tl.constexpr,
    tile_tokens: tl.constexpr,
    block_r: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    split = tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    length = tl.load(tiles_ptr + tile * 3 + 2)
    rank = 0
    for slice_index in tl.static_range(rank_stride):
        rank += tl.load(rank_ptr + slot * rank_stride + slice_index)
    first_row = tl.program_id(1) * block_r
    if first_row >= rank:
        return

    a_address = tl.multiple_of(tl.load(address_ptr + slot * address_stride), 16)
    a_ptr = tl.multiple_of(a_address.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    m = tl.arange(0, tile_tokens)
    r = first_row + tl.arange(0, block_r)
    d = tl.arange(0, block_d)
    token = tl.load(order_ptr + start + m, mask=m < length, other=0)
    x_row = x_ptr + token[:, None] * num_features
    a_row = a_ptr + r[None, :].to(tl.int64) * num_features

    acc = tl.zeros((tile_tokens, block_r), dtype=tl.float32)
    first = split * split_features
    for at in range(first, min(first + split_features, num_features), block_d):
        inside = at + d < num_features
        x = tl.load(x_row + (at + d)[None, :], mask=(m < length)[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_row + (at + d)[:, None], mask=(r < rank)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    p_row = p_ptr + (split.to(tl.int64) * num_rows + start + m)[:, None] * num_columns
    tl.store(p_row + r[None, :], acc, mask=(m < length)[:, None] & (r < rank)[None, :])


def num_splits(in_features: int) -> int:
    return min(MAX_SPLITS, -(-in_features // FEATURES_A_SPLIT))


def shrink(x_TD: Tensor, packed: PackedLoRA, batch: LoRABatch) -> Tensor:
    """Partial sums of A[slot] @ x for the tokens with an adapter, in the order of batch.order_M.

    Returns fp32 [K, M, C], not yet scaled; expand() sums over K. Columns past a row's own total rank are garbage.
    Slots are trusted here, since checking would sync the GPU: LoRAModelManager.activate checks.
    """
    columns = packed.max_total_rank(batch.slots)
    assert columns > 0, "a step whose adapters all leave this linear alone must not launch its kernels"
    assert x_TD.is_contiguous()
    assert x_TD.shape == (batch.num_tokens, packed.in_features)
    assert packed.address_SA.stride() == (1 + MAX_SLICES, 1)
    rows, splits = batch.order_M.shape[0], num_splits(packed.in_features)
    p_KMC = torch.empty(splits, rows, columns, dtype=torch.float32, device=x_TD.device)
    _shrink_kernel[(batch.tiles_K3.shape[0], triton.cdiv(columns, BLOCK_R), splits)](
        x_TD,
        p_KMC,
        packed.address_SA,
        packed.rank_SP,
        batch.order_M,
        batch.tiles_K3,
        packed.in_features,
        rows,
        columns,
        triton.cdiv(triton.cdiv(packed.in_features, splits), BLOCK_D) * BLOCK_D,
        address_stride=1 + MAX_SLICES,
        rank_stride=MAX_SLICES,
        tile_tokens=TILE_TOKENS,
        block_r=BLOCK_R,
        block_d=BLOCK_D,
    )
    return p_KMC
