"""The GPU's part of kernels/lora/absorbed_lora.py, which says what is computed.

Idea: one program takes one tile (tokens of one slot) and one head. It multiplies the tile's rows by the first of the
two matrices, which gives [tile, ranks] in registers, and then by the second. Ranks are taken in blocks, usually all at
once. So A and a head's rows of B are read once for each tile, and nothing goes through memory in between. Tiles are
those of the other LoRA kernels. The width of the arithmetic follows the slot's own rank. The kernels have been compared
with their twin by Triton's interpreter; their tiles have not been tuned on a GPU.

Memory: x and out are [T, H, *] with a last stride of 1. A is [rank, C] and B is [H * (K + V), rank], row-major at the
addresses in the tile's table row; FP8 scales lie behind A as in kernels/lora/lora_shrink.py.
"""

# T tokens · H this rank's heads · C latent size · N rows of B that belong to a head's key, or to its value

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.extras.affine_triton import own_vector
from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.lora_batch import CHUNK_RANKS, LoRABatch
from lorafleet.kernels.lora.packed_lora import MAX_SLICES, PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8

MAX_BLOCK_R = 64  # ranks that a program takes at once
BLOCK = 64  # numbers of x, and of out, that a program takes at once


@jit(do_not_specialize=["linear"])
def _add_absorbed_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    address_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    linear: tl.tensor,
    x_stride_t: tl.constexpr,
    x_stride_h: tl.constexpr,
    out_stride_t: tl.constexpr,
    out_stride_h: tl.constexpr,
    of_head: tl.constexpr,
    first_row: tl.constexpr,
    num_inputs: tl.constexpr,
    num_outputs: tl.constexpr,
    starts_with_b: tl.constexpr,
    address_stride: tl.constexpr,
    rank_stride: tl.constexpr,
    tile_tokens: tl.constexpr,
    block: tl.constexpr,
    block_r: tl.constexpr,
    fp8: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = linear * tl.num_programs(0) + tile
    rank = tl.load(rank_ptr + row * rank_stride)
    if rank == 0:
        return
    scale = tl.load(scale_ptr + row * rank_stride)
    compute: tl.constexpr = x_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float8e4nv if fp8 else compute
    a_address = tl.load(address_ptr + row * address_stride)
    a_ptr = a_address.to(tl.pointer_type(dtype))
    b_ptr = tl.load(address_ptr + row * address_stride + 1).to(tl.pointer_type(dtype))
    b_ptr += (head * of_head + first_row).to(tl.int64) * rank
    latent_dim: tl.constexpr = num_outputs if starts_with_b else num_inputs
    row_scale_ptr = (a_address + tl.cdiv(rank.to(tl.int64) * latent_dim, 16) * 16).to(tl.pointer_type(tl.float32))
    m = tl.arange(0, tile_tokens)
    token = tl.load(tokens_ptr + tile * tile_tokens + m).to(tl.int64)
    mine = (token >= 0)[:, None]
    x_row = x_ptr + token[:, None] * x_stride_t + head * x_stride_h
    out_row = out_ptr + token[:, None] * out_stride_t + head * out_stride_h
    i = tl.arange(0, block)
    for first_rank in range(0, rank, block_r):
        r = first_rank + tl.arange(0, block_r)
        own = r < rank
        inner = tl.zeros((tile_tokens, block_r), dtype=tl.float32)
        for first in range(0, num_inputs, block):
            n = first + i
            inside = n < num_inputs
            x = tl.load(x_row + n[None, :], mask=mine & inside[None, :], other=0.0)
            # The first matrix as [inputs, ranks].
            if starts_with_b:
                offset = n[:, None] * rank + r[None, :]
                matrix = tl.load(b_ptr + offset, mask=inside[:, None] & own[None, :], other=0.0)
            else:
                offset = r[None, :] * latent_dim + n[:, None]
                matrix = tl.load(a_ptr + offset, mask=inside[:, None] & own[None, :], other=0.0)
            inner = tl.dot(x, matrix.to(compute), inner, input_precision="ieee")
        inner *= scale
        if fp8:
            inner *= tl.load(row_scale_ptr + r, mask=own, other=0.0)[None, :]
        for first in range(0, num_outputs, block):
            n = first + i
            inside = n < num_outputs
            # The second matrix as [ranks, outputs].
            if starts_with_b:
                offset = r[:, None] * latent_dim + n[None, :]
                matrix = tl.load(a_ptr + offset, mask=own[:, None] & inside[None, :], other=0.0)
            else:
                offset = n[None, :] * rank + r[:, None]
                matrix = tl.load(b_ptr + offset, mask=own[:, None] & inside[None, :], other=0.0)
            mask = mine & inside[None, :]
            out = tl.load(out_row + n[None, :], mask=mask, other=0.0).to(tl.float32)
            out = tl.dot(inner.to(compute), matrix.to(compute), out, input_precision="ieee")
            tl.store(out_row + n[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def add_absorbed(
    x_THI: Tensor,
    out_THO: Tensor,
    of_head: int,
    first_row: int,
    packed: PackedLoRA,
    batch: LoRABatch,
    starts_with_b: bool,
) -> None:
    """Adds s A^T (B^T x) to out in place, or s B (A x) if starts_with_b is False. B is the rows of one head from
    first_row on. Launches nothing if no adapter has the linear, unless the batch is static."""
    largest = batch.max_rank if batch.max_rank is not None else packed.max_total_rank(batch.slots)
    if largest == 0:
        return
    assert packed.dtype is not None and not packed.layout.exchanges
    assert x_THI.stride(2) == out_THO.stride(2) == 1
    num_tokens, heads, num_inputs = x_THI.shape
    assert num_tokens == batch.num_tokens and packed.out_features == (heads * of_head,)
    tables, num_outputs = batch.addresses.tables, out_THO.shape[2]
    assert packed.in_features == (num_outputs if starts_with_b else num_inputs)
    fp8 = packed.dtype == FP8
    x_THI = x_THI if fp8 else x_THI.to(packed.dtype)
    _add_absorbed_kernel[(batch.num_tiles, heads)](
        x_THI,
        out_THO,
        tables.address_LKA,
        tables.rank_LKP,
        tables.scale_LKP,
        batch.plan.tokens_KM,
        packed.index,
        x_stride_t=x_THI.stride(0),
        x_stride_h=x_THI.stride(1),
        out_stride_t=out_THO.stride(0),
        out_stride_h=out_THO.stride(1),
        of_head=of_head,
        first_row=first_row,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        starts_with_b=starts_with_b,
        address_stride=1 + MAX_SLICES,
        rank_stride=MAX_SLICES,
        tile_tokens=batch.tile_tokens,
        block=BLOCK,
        block_r=min(MAX_BLOCK_R, max(CHUNK_RANKS, triton.next_power_of_2(largest))),
        fp8=fp8,
        num_warps=4,
    )


@jit(do_not_specialize=["affine_ptr"])
def _head_affine_kernel(
    x_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    x_stride_t: tl.constexpr,
    x_stride_h: tl.constexpr,
    of_head: tl.constexpr,
    first_row: tl.constexpr,
    size: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    scale = tl.load(affine_ptr + token)
    bias = tl.load(affine_ptr + tl.num_programs(0) + token) if has_bias else scale * 0
    if (scale == 0) & (bias == 0):
        return
    i = tl.arange(0, block)
    inside = i < size
    place = x_ptr + token * x_stride_t + head * x_stride_h + i
    row = head * of_head + first_row + i
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(own_vector(scale) + row, mask=inside & (scale != 0), other=1.0)
    if has_bias:
        x += tl.load(own_vector(bias) + row, mask=inside & (bias != 0), other=0.0)
    tl.store(place, x.to(x_ptr.dtype.element_ty), mask=inside)


def apply_head_affine(x_THN: Tensor, of_head: int, first_row: int, affine_2T: Tensor, has_bias: bool) -> None:
    """Multiplies x by the tokens' own scales of these rows, and adds their biases if has_bias is True, in place."""
    num_tokens, heads, size = x_THN.shape
    assert x_THN.stride(2) == 1 and affine_2T.shape == (2, num_tokens) and affine_2T.is_contiguous()
    _head_affine_kernel[(num_tokens, heads)](
        x_THN,
        affine_2T,
        x_stride_t=x_THN.stride(0),
        x_stride_h=x_THN.stride(1),
        of_head=of_head,
        first_row=first_row,
        size=size,
        has_bias=has_bias,
        block=triton.next_power_of_2(size),
        num_warps=1,
    )
