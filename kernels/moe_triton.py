"""Linears of a mixture of experts on the GPU: one launch for all pairs of a step, whichever experts were chosen.
kernels/moe_torch.py has the twin.

Idea: the pairs are sorted by expert into tiles of pairs that share one, by counting: a program an expert counts its
pairs, then a program an expert adds up the tiles of those before it and writes its own. Then a GEMM takes a tile and
a block of outputs a program: rows of x are gathered by pair, rows of the result scattered, so nothing is copied into
order. There are as many tiles as any choice may need; those left over end at once.

Memory: x [T, D] or [N, D], w [E, O, D] and out [N, O] row-major. Tables int32: expert_M of each tile (-1: none),
pair_MB its pairs, then -1.
Tile shapes measured on an H200 by benchmarks/moe_kernels.py.
"""

# T tokens · E experts · K experts a token · N = T * K pairs · D in · O out · M tiles · B pairs of a tile

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 1024  # pairs that a counting program reads at a time


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of the GEMM's programs; block_d in bytes of x's dtype times 2: elements of a half precision."""

    tile_pairs: int
    block_o: int
    block_d: int
    warps: int
    stages: int


# By how many pairs an expert has on average, at most.
_SHAPES = (
    (16, _Shape(16, 64, 128, 4, 4)),
    (32, _Shape(32, 64, 128, 4, 4)),
    (96, _Shape(64, 128, 64, 4, 4)),
    (float("inf"), _Shape(128, 128, 64, 8, 4)),
)


def _shape_for(num_pairs: int, num_experts: int) -> _Shape:
    return next(shape for most, shape in _SHAPES if num_pairs <= most * num_experts)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]  # triton has no types
def _count_kernel(expert_ptr: tl.tensor, count_ptr: tl.tensor, num_pairs: tl.tensor, block_n: tl.constexpr) -> None:
    expert = tl.program_id(0)
    count = tl.zeros((block_n,), tl.int32)
    for first in tl.range(0, num_pairs, block_n):
        n = first + tl.arange(0, block_n)
        own = tl.load(expert_ptr + n, mask=n < num_pairs, other=-1) == expert
        count += own.to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])  # type: ignore[untyped-decorator]  # triton has no types
def _place_kernel(
    expert_ptr: tl.tensor,
    count_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_e: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    e = tl.arange(0, block_e)
    counts = tl.load(count_ptr + e, mask=e < num_experts, other=0)
    tiles = tl.cdiv(counts, tile_pairs)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
    end_tile = first_tile + tl.cdiv(count, tile_pairs)
    i = tl.arange(0, block_n)
    for first in tl.range(first_tile, end_tile, block_n):
        tl.store(expert_of_tile_ptr + first + i, expert, mask=first + i < end_tile)
    if expert == num_experts - 1:
        for first in tl.range(end_tile, num_tiles, block_n):
            tl.store(expert_of_tile_ptr + first + i, -1, mask=first + i < num_tiles)
    own_ptr = pair_ptr + first_tile * tile_pairs
    placed = 0
    for first in tl.range(0, num_pairs, block_n):
        n = first + i
        own = tl.load(expert_ptr + n, mask=n < num_pairs, other=-1) == expert
        place = placed + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(own_ptr + place, n, mask=own)
        placed += tl.sum(own.to(tl.int32), 0)
    rest = count + tl.arange(0, tile_pairs)
    tl.store(own_ptr + rest, -1, mask=rest < (end_tile - first_tile) * tile_pairs)


@triton.jit(do_not_specialize=["pairs_a_row"])  # type: ignore[untyped-decorator]  # triton has no types
def _linear_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    out_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    pairs_a_row: tl.tensor,
    num_features: tl.constexpr,
    num_outputs: tl.constexpr,
    tile_pairs: tl.constexpr,
    block_o: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    blocks: tl.constexpr = (num_outputs + block_o - 1) // block_o
    tile = tl.program_id(0) // blocks
    expert = tl.load(expert_of_tile_ptr + tile)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + tile * tile_pairs + tl.arange(0, tile_pairs)).to(tl.int64)
    there = (pair >= 0)[:, None]
    o = (tl.program_id(0) % blocks) * block_o + tl.arange(0, block_o)
    d = tl.arange(0, block_d)
    x_row = x_ptr + (pair // pairs_a_row)[:, None] * num_features + d[None, :]
    w_row = w_ptr + (expert.to(tl.int64) * num_outputs + o)[None, :] * num_features + d[:, None]
    acc = tl.zeros((tile_pairs, block_o), dtype=tl.float32)
    for at in tl.range(0, num_features, block_d):
        x = tl.load(x_row + at, mask=there & (at + d < num_features)[None, :], other=0.0)
        w = tl.load(w_row + at, mask=(o < num_outputs)[None, :] & (at + d < num_features)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out = out_ptr + pair[:, None] * num_outputs + o[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=there & (o < num_outputs)[None, :])


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """A step's pairs in tiles, see above."""

    num_pairs: int
    shape: _Shape
    expert_M: Tensor
    pair_MB: Tensor

    @classmethod
    def of(cls, expert_TK: Tensor, num_experts: int) -> ExpertTiles:
        """expert_TK: int32, contiguous."""
        assert expert_TK.is_contiguous() and expert_TK.dtype == torch.int32
        device, num_pairs = expert_TK.device, expert_TK.numel()
        shape = _shape_for(num_pairs, num_experts)
        # Each expert rounds up once at most.
        num_tiles = min(num_pairs, num_experts + num_pairs // shape.tile_pairs)
        count_E = torch.empty(num_experts, dtype=torch.int32, device=device)
        expert_M = torch.empty(num_tiles, dtype=torch.int32, device=device)
        pair_MB = torch.empty(num_tiles, shape.tile_pairs, dtype=torch.int32, device=device)
        _count_kernel[(num_experts,)](expert_TK, count_E, num_pairs, block_n=BLOCK_N)
        _place_kernel[(num_experts,)](
            expert_TK,
            count_E,
            expert_M,
            pair_MB,
            num_pairs,
            num_tiles,
            num_experts=num_experts,
            tile_pairs=shape.tile_pairs,
            block_e=triton.next_power_of_2(num_experts),
            block_n=BLOCK_N,
        )
        return cls(num_pairs, shape, expert_M, pair_MB)

    def linear(self, x: Tensor, w_EOD: Tensor) -> Tensor:
        _, num_outputs, num_features = w_EOD.shape
        assert x.is_contiguous() and w_EOD.is_contiguous() and x.shape[1] == num_features
        assert x.dtype == w_EOD.dtype and self.num_pairs % len(x) == 0
        out_NO = torch.empty(self.num_pairs, num_outputs, dtype=x.dtype, device=x.device)
        shape = self.shape
        _linear_kernel[(len(self.expert_M) * triton.cdiv(num_outputs, shape.block_o),)](
            x,
            w_EOD,
            out_NO,
            self.expert_M,
            self.pair_MB,
            self.num_pairs // len(x),
            num_features=num_features,
            num_outputs=num_outputs,
            tile_pairs=shape.tile_pairs,
            block_o=shape.block_o,
            block_d=shape.block_d * 2 // x.dtype.itemsize,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        return out_NO
