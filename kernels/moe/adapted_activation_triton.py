"""The activation between an expert's two linears in a step with adapters, in one launch. It multiplies P by B of
gate_up and adds that to gate and up before the activation, so the addition is never written.
kernels/moe/moe_torch.py and kernels/moe/expert_activation.py have the twins.

Idea: a program takes some tiles of pairs that share an expert and a slot, and BLOCK_I columns of gate and up. The
float32 sums of the base and the adapter are rounded once, after the activation.

Memory: gate_up is [N, U], where a row is gate, then up, or up alone. The bias is [E, U], out is [N, I]. P is described
in kernels/moe/expert_lora_triton.py. An adapter has one group for gate and up, or one for each.
"""

# N pairs · I intermediate size · E experts · U rows of gate_up: 2I, or I without a gate · K splits · C columns of P

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.expert_activation import ExpertActivation, is_gated
from lorafleet.kernels.moe.expert_activation_triton import activation_of, formula_of
from lorafleet.kernels.moe.expert_lora import StepExperts
from lorafleet.kernels.moe.expert_lora_triton import (
    MOST_PROGRAMS,
    TRITON_DTYPES,
    add_expanded,
    b_of,
    block_of_ranks,
    field,
    pairs_of_tile,
    rank_of,
    record_of,
)
from lorafleet.kernels.moe.moe_tiles_triton import AdapterTiles

BLOCK_I, BLOCK_I_OF_LARGE = 128, 64  # for tiles of up to SMALL_TILE pairs, and for larger ones
SMALL_TILE = 16


@jit()
def _base(
    y_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    pair: tl.tensor,
    expert: tl.tensor,
    u: tl.tensor,
    mask: tl.tensor,
    inside: tl.tensor,
    width: tl.constexpr,
    has_bias: tl.constexpr,
) -> tl.tensor:
    """Returns the columns u of the base's output, with their bias, in float32."""
    y = tl.load(y_ptr + pair[:, None] * width + u[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_bias:
        y += tl.load(bias_ptr + expert * width + u, mask=inside, other=0.0).to(tl.float32)[None, :]
    return y


@jit(do_not_specialize=["record_ptr", "num_pairs", "num_columns", "num_tiles"])
def _adapted_activation_kernel(
    y_ptr: tl.tensor,
    p_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    slot_of_tile_ptr: tl.tensor,
    start_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    record_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_columns: tl.tensor,
    num_tiles: tl.tensor,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    num_splits: tl.constexpr,
    has_bias: tl.constexpr,
    formula: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_i: tl.constexpr,
    block_r: tl.constexpr,
    b_dtype: tl.constexpr,
) -> None:
    i = tl.program_id(1) * block_i + tl.arange(0, block_i)
    inside = i < size
    num_columns = num_columns // 16 * 16  # the same number, but the compiler knows that it is a multiple of 16
    split_stride = num_pairs.to(tl.int64) * num_columns
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
        if expert >= 0:
            record = record_of(slot_of_tile_ptr, tile, record_ptr)
            pair = pairs_of_tile(tile, pair_ptr, start_ptr, tile_pairs)
            there = (pair >= 0)[:, None]
            mask = there & inside[None, :]
            first = _base(y_ptr, bias_ptr, pair, expert, i, mask, inside, width, has_bias)
            up = first
            if formula != "relu2":
                up = _base(y_ptr, bias_ptr, pair, expert, size + i, mask, inside, width, has_bias)
            if record != 0:
                rank = rank_of(record)
                p_row = p_ptr + pair[:, None] * num_columns
                b_row = b_of(record, b_dtype) + (expert * width + i)[None, :] * rank
                first = add_expanded(
                    first, p_row, there, b_row, inside[None, :], rank, split_stride, num_splits, block_r
                )
                if formula != "relu2":
                    p_row += rank * (field(record, 4).to(tl.int32) - 1)
                    b_row += size * rank
                    up = add_expanded(up, p_row, there, b_row, inside[None, :], rank, split_stride, num_splits, block_r)
            out = activation_of(first, up, alpha, limit, formula)
            tl.store(out_ptr + pair[:, None] * size + i[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def activate_adapted(
    y_NU: Tensor,
    p_KNC: Tensor,
    activation: ExpertActivation,
    bias_EU: Tensor | None,
    tiles: AdapterTiles,
    adapters: StepExperts,
) -> Tensor:
    """Returns the activation of gate_up's output y with the adapters' additions, [N, I] in y's dtype.

    p is shrink_experts() of gate_up's input.
    """
    splits, num_pairs, num_columns = p_KNC.shape
    width = y_NU.shape[1]
    size = width // 2 if is_gated(activation) else width
    assert y_NU.is_contiguous() and len(y_NU) == num_pairs
    assert bias_EU is None or (bias_EU.is_contiguous() and bias_EU.shape[1] == width)
    out_NI = torch.empty(num_pairs, size, dtype=y_NU.dtype, device=y_NU.device)
    block_i = BLOCK_I if tiles.tile_pairs <= SMALL_TILE else BLOCK_I_OF_LARGE
    _adapted_activation_kernel[(min(tiles.num_tiles, MOST_PROGRAMS), triton.cdiv(size, block_i))](
        y_NU,
        p_KNC,
        bias_EU,
        out_NI,
        tiles.expert_L,
        tiles.slot_L,
        tiles.start_L,
        tiles.pair_MB,
        adapters.record_S,
        num_pairs,
        num_columns,
        tiles.num_tiles,
        **formula_of(activation),
        size=size,
        width=width,
        num_splits=splits,
        has_bias=bias_EU is not None,
        tile_pairs=tiles.tile_pairs,
        block_i=block_i,
        block_r=block_of_ranks(adapters),
        b_dtype=TRITON_DTYPES[adapters.dtype],
        num_warps=4,
    )
    return out_NI
