"""The pairs of a step on the GPU, sorted by expert into tiles. All pairs of a tile share one expert.

Idea: the sort counts. One program per expert counts the expert's pairs. Then one program per expert adds up the tiles
of the experts before it, and writes its own tiles. There are as many tiles as any choice may need; unused ones have no
expert.

Memory: see ExpertTiles.
"""

# T tokens · K experts a token · E experts · M tiles · B pairs of a tile

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_N = 1024  # pairs that a program reads at a time


@jit(do_not_specialize=["num_pairs"])
def _count_kernel(expert_ptr: tl.tensor, count_ptr: tl.tensor, num_pairs: tl.tensor, block_n: tl.constexpr) -> None:
    expert = tl.program_id(0)
    count = tl.zeros((block_n,), tl.int32)
    for first in tl.range(0, num_pairs, block_n):
        n = first + tl.arange(0, block_n)
        own = tl.load(expert_ptr + n, mask=n < num_pairs, other=-1) == expert
        count += own.to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(count, 0))


@jit(do_not_specialize=["num_pairs", "num_tiles"])
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


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    expert_M: Tensor  # int32: each tile's expert, -1 for none
    pair_MB: Tensor  # int32: each tile's pairs in their order, then -1

    @property
    def num_tiles(self) -> int:
        return len(self.expert_M)

    @property
    def tile_pairs(self) -> int:
        return self.pair_MB.shape[1]


def count_pairs(expert_TK: Tensor, num_experts: int) -> Tensor:
    """Returns the number of pairs of each expert, int32 [E]. expert_TK is int32 and contiguous."""
    assert expert_TK.is_contiguous() and expert_TK.dtype == torch.int32
    count_E = torch.empty(num_experts, dtype=torch.int32, device=expert_TK.device)
    _count_kernel[(num_experts,)](expert_TK, count_E, expert_TK.numel(), block_n=BLOCK_N)
    return count_E


def make_tiles(expert_TK: Tensor, count_E: Tensor, tile_pairs: int) -> ExpertTiles:
    num_pairs, num_experts, device = expert_TK.numel(), len(count_E), expert_TK.device
    num_tiles = min(num_pairs, num_experts + num_pairs // tile_pairs)  # each expert rounds up once at most
    tiles = ExpertTiles(
        torch.empty(num_tiles, dtype=torch.int32, device=device),
        torch.empty(num_tiles, tile_pairs, dtype=torch.int32, device=device),
    )
    _place_kernel[(num_experts,)](
        expert_TK,
        count_E,
        tiles.expert_M,
        tiles.pair_MB,
        num_pairs,
        num_tiles,
        num_experts=num_experts,
        tile_pairs=tile_pairs,
        block_e=triton.next_power_of_2(num_experts),
        block_n=BLOCK_N,
    )
    return tiles
