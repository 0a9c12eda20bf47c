"""The pairs of a step on the GPU, sorted into tiles for the GEMMs and, in a step with adapters on experts, into tiles
for the adapters' kernels. One launch makes the tiles of few pairs without adapters, and two make all others. One or two
tokens without adapters need none: a tile has one pair.

Idea: the sort counts. One program per expert counts the expert's pairs and its tiles. Then one program per expert adds
up the tiles of the experts before it, and writes its own. If a program can read all pairs at a time, it counts those of
all experts itself. With adapters, the programs take the tokens in the order of
their slots, which the host knows. So an expert's pairs of one slot are neighbors, and a new tile of the adapters begins
wherever the slot changes or a tile is full. There are as many tiles as any choice may need; unused ones have no expert.

Memory: see ExpertTiles and AdapterTiles. Both refer to the same sorted list of pairs.
"""

# T tokens · K experts a token · E experts · M tiles · B pairs of a tile · L tiles of the adapters

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.expert_lora import StepExperts

# Pairs that a program reads at a time, and its warps. The second shape is for steps with more than MANY_PAIRS pairs.
FEW, MANY = (1024, 4), (4096, 16)
MANY_PAIRS = 2048
# Up to so many tokens, each pair is a tile. The experts that two tokens share are read twice, once from the cache.
UNSORTED_TOKENS = 2


@jit()
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@jit()
def _read_pairs(
    first: tl.tensor,
    expert_ptr: tl.tensor,
    order_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    num_pairs: tl.tensor,
    per_token: tl.constexpr,
    by_slot: tl.constexpr,
    block_n: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the pairs at the positions from `first` on, their experts and slots, and whether a position is the first
    of its slot."""
    n = first + tl.arange(0, block_n)
    inside = n < num_pairs
    pair, slot, begins = n, n, inside
    if by_slot:
        i = n // per_token
        token = tl.load(order_ptr + i, mask=inside, other=0)
        token_before = tl.load(order_ptr + i - 1, mask=inside & (i > 0), other=0)
        pair = token * per_token + n % per_token
        slot = tl.load(slot_ptr + token)
        begins = (n % per_token == 0) & (slot != tl.load(slot_ptr + token_before))
    return pair, tl.load(expert_ptr + pair, mask=inside, other=-1), slot, begins


@jit()
def _begin_tiles(
    own: tl.tensor, before: tl.tensor, begins: tl.tensor, slot_start: tl.tensor, adapter_pairs: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns whether a tile of the adapters begins at each position (1 or 0), and slot_start for the next positions.

    before is the number of the expert's pairs before each position, and slot_start that before the present slot.
    """
    start = tl.maximum(slot_start, tl.associative_scan(tl.where(begins, before, 0), 0, _larger))
    is_first = own * ((before - start) % adapter_pairs == 0).to(tl.int32)
    return is_first, tl.max(start, 0)


@jit(do_not_specialize=["num_pairs", "order_ptr", "slot_ptr"])
def _count_kernel(
    expert_ptr: tl.tensor,
    order_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    count_ptr: tl.tensor,
    adapter_count_ptr: tl.tensor,
    num_pairs: tl.tensor,
    per_token: tl.constexpr,
    adapter_pairs: tl.constexpr,
    by_slot: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    num_own, num_tiles, slot_start = 0, 0, 0
    for first in tl.range(0, num_pairs, block_n):
        _, found, _, begins = _read_pairs(
            first, expert_ptr, order_ptr, slot_ptr, num_pairs, per_token, by_slot, block_n
        )
        own = (found == expert).to(tl.int32)
        if by_slot:
            before = num_own + tl.cumsum(own, 0) - own
            is_first, slot_start = _begin_tiles(own, before, begins, slot_start, adapter_pairs)
            num_tiles += tl.sum(is_first, 0)
        num_own += tl.sum(own, 0)
    tl.store(count_ptr + expert, num_own)
    if by_slot:
        tl.store(adapter_count_ptr + expert, num_tiles)


@jit(do_not_specialize=["num_pairs", "num_tiles", "num_adapter_tiles", "order_ptr", "slot_ptr"])
def _place_kernel(
    expert_ptr: tl.tensor,
    order_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    count_ptr: tl.tensor,
    adapter_count_ptr: tl.tensor,
    expert_of_tile_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    used_ptr: tl.tensor,
    adapter_expert_ptr: tl.tensor,
    adapter_slot_ptr: tl.tensor,
    adapter_start_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_tiles: tl.tensor,
    num_adapter_tiles: tl.tensor,
    num_experts: tl.constexpr,
    per_token: tl.constexpr,
    tile_pairs: tl.constexpr,
    adapter_pairs: tl.constexpr,
    by_slot: tl.constexpr,
    counts_all: tl.constexpr,
    block_e: tl.constexpr,
    block_n: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    e = tl.arange(0, block_e)
    if counts_all:
        n = tl.arange(0, block_n)
        counts = tl.histogram(tl.load(expert_ptr + n, mask=n < num_pairs, other=num_experts), block_e)
        counts = tl.where(e < num_experts, counts, 0)
    else:
        counts = tl.load(count_ptr + e, mask=e < num_experts, other=0)
    tiles = tl.cdiv(counts, tile_pairs)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
    end_tile = first_tile + tl.cdiv(count, tile_pairs)
    i = tl.arange(0, block_n)
    for first in tl.range(first_tile, end_tile, block_n):
        tl.store(expert_of_tile_ptr + first + i, expert, mask=first + i < end_tile)
    adapter_tile = 0
    if by_slot:
        adapter_counts = tl.load(adapter_count_ptr + e, mask=e < num_experts, other=0)
        adapter_tile = tl.sum(tl.where(e < expert, adapter_counts, 0), 0)
    first_place = first_tile * tile_pairs
    num_own, slot_start = 0, 0
    for first in tl.range(0, num_pairs, block_n):
        pair, found, slot, begins = _read_pairs(
            first, expert_ptr, order_ptr, slot_ptr, num_pairs, per_token, by_slot, block_n
        )
        own = (found == expert).to(tl.int32)
        before = num_own + tl.cumsum(own, 0) - own
        tl.store(pair_ptr + first_place + before, pair, mask=own > 0)
        if by_slot:
            is_first, slot_start = _begin_tiles(own, before, begins, slot_start, adapter_pairs)
            tile = adapter_tile + tl.cumsum(is_first, 0) - 1
            tl.store(adapter_expert_ptr + tile, expert, mask=is_first > 0)
            tl.store(adapter_slot_ptr + tile, slot, mask=is_first > 0)
            tl.store(adapter_start_ptr + tile, first_place + before, mask=is_first > 0)
            adapter_tile += tl.sum(is_first, 0)
        num_own += tl.sum(own, 0)
    rest = count + tl.arange(0, tile_pairs)
    tl.store(pair_ptr + first_place + rest, -1, mask=rest < (end_tile - first_tile) * tile_pairs)
    if expert == num_experts - 1:
        tl.store(used_ptr, end_tile)
        for first in tl.range(end_tile, num_tiles, block_n):
            tl.store(expert_of_tile_ptr + first + i, -1, mask=first + i < num_tiles)
        if by_slot:
            tl.store(adapter_start_ptr + adapter_tile, end_tile * tile_pairs)
            for first in tl.range(adapter_tile, num_adapter_tiles, block_n):
                tl.store(adapter_expert_ptr + first + i, -1, mask=first + i < num_adapter_tiles)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of pairs that share an expert."""

    expert_M: Tensor  # int32: each tile's expert, -1 for none
    pair_MB: Tensor  # int32: each tile's pairs, then -1
    used_1: Tensor  # int32: number of tiles that have an expert. They come first.

    @property
    def num_tiles(self) -> int:
        return len(self.expert_M)

    @property
    def tile_pairs(self) -> int:
        return self.pair_MB.shape[1]


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Tiles of pairs that share an expert and a slot.

    Tile i has at most tile_pairs pairs, those from start_L[i] to start_L[i + 1] in the list pair_MB of ExpertTiles.
    Entries of -1 between them are no pairs.
    """

    expert_L: Tensor  # int32: each tile's expert, -1 for none; all tiles behind an unused one are unused
    slot_L: Tensor  # int32: each tile's slot, -1 for tokens without an adapter
    start_L: Tensor  # int32 [L + 1]
    pair_MB: Tensor
    tile_pairs: int

    @property
    def num_tiles(self) -> int:
        return len(self.expert_L)


def make_tiles(expert_TK: Tensor, num_experts: int, tile_pairs: int) -> ExpertTiles:
    """Returns the pairs in tiles by expert. expert_TK is int32 and contiguous."""
    assert expert_TK.is_contiguous() and expert_TK.dtype == torch.int32
    if len(expert_TK) <= UNSORTED_TOKENS:
        return ExpertTiles(expert_TK.view(-1), *_single_pairs(expert_TK.numel(), tile_pairs, expert_TK.device))
    return _make(expert_TK, num_experts, tile_pairs, None, 1)[0]


@cache
def _single_pairs(num_pairs: int, tile_pairs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns pair_MB and used_1 of tiles that have one pair each."""
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing()  # the copies wait for the GPU
    pair_MB = torch.full((num_pairs, tile_pairs), -1, dtype=torch.int32)
    pair_MB[:, 0] = torch.arange(num_pairs)
    return pair_MB.to(device), torch.tensor([num_pairs], dtype=torch.int32).to(device)


def make_adapter_tiles(
    expert_TK: Tensor, num_experts: int, tile_pairs: int, adapters: StepExperts, adapter_pairs: int
) -> tuple[ExpertTiles, AdapterTiles]:
    """Sorts the pairs by expert and slot. Tiles of the adapters have at most adapter_pairs pairs."""
    tiles, adapter_tiles = _make(expert_TK, num_experts, tile_pairs, adapters, adapter_pairs)
    assert adapter_tiles is not None
    return tiles, adapter_tiles


def _make(
    expert_TK: Tensor, num_experts: int, tile_pairs: int, adapters: StepExperts | None, adapter_pairs: int
) -> tuple[ExpertTiles, AdapterTiles | None]:
    assert expert_TK.is_contiguous() and expert_TK.dtype == torch.int32
    (num_tokens, per_token), num_pairs, device = expert_TK.shape, expert_TK.numel(), expert_TK.device

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    num_tiles = min(num_pairs, num_experts + num_pairs // tile_pairs)  # each expert rounds up once at most
    tiles = ExpertTiles(ints(num_tiles), ints(num_tiles, tile_pairs), ints(1))
    adapter_tiles, num_adapter_tiles = None, 0
    if adapters is not None:
        # An expert rounds up once at most for each slot, and for the tokens without an adapter.
        keys = num_experts * min(num_tokens, 1 + len(adapters.record_S))
        num_adapter_tiles = min(num_pairs, keys + num_pairs // adapter_pairs)
        length = num_adapter_tiles
        adapter_tiles = AdapterTiles(ints(length), ints(length), ints(length + 1), tiles.pair_MB, adapter_pairs)
    block_n, warps = MANY if num_pairs > MANY_PAIRS else FEW
    counts = ints(2, num_experts)
    order = (None, None) if adapters is None else (adapters.order_T, adapters.slot_T)
    written = (
        (None, None, None)
        if adapter_tiles is None
        else (
            adapter_tiles.expert_L,
            adapter_tiles.slot_L,
            adapter_tiles.start_L,
        )
    )
    constants = {
        "per_token": per_token,
        "adapter_pairs": adapter_pairs,
        "by_slot": adapters is not None,
        "block_n": block_n,
        "num_warps": warps,
    }
    counts_all = num_pairs <= block_n and adapters is None
    if not counts_all:
        _count_kernel[(num_experts,)](expert_TK, *order, counts[0], counts[1], num_pairs, **constants)
    _place_kernel[(num_experts,)](
        expert_TK,
        *order,
        counts[0],
        counts[1],
        tiles.expert_M,
        tiles.pair_MB,
        tiles.used_1,
        *written,
        num_pairs,
        num_tiles,
        num_adapter_tiles,
        num_experts=num_experts,
        tile_pairs=tile_pairs,
        counts_all=counts_all,
        block_e=triton.next_power_of_2(num_experts + 1),  # one more for places behind the last pair
        **constants,
    )
    return tiles, adapter_tiles
