"""The gather of kernels/lora/tile_tables.py as one launch. One program takes one linear and BLOCK_K tiles."""

# L packed linears · K tiles · P slices · S slots

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_K = 64


# A new number of tiles must never wait for a compiler.
@jit(do_not_specialize=["num_tiles"])
def _gather_kernel(
    slot_ptr: tl.tensor,
    address_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    to_address_ptr: tl.tensor,
    to_rank_ptr: tl.tensor,
    to_scale_ptr: tl.tensor,
    num_tiles: tl.tensor,
    num_slots: tl.constexpr,
    num_slices: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    linear = tl.program_id(0)
    k = tl.program_id(1) * block_k + tl.arange(0, block_k)
    inside = k < num_tiles
    slot = tl.load(slot_ptr + k, mask=inside, other=-1)
    used = slot >= 0
    source = linear * num_slots + slot
    target = linear * num_tiles + k
    for a in tl.static_range(1 + num_slices):
        address = tl.load(address_ptr + source * (1 + num_slices) + a, mask=used, other=0)
        tl.store(to_address_ptr + target * (1 + num_slices) + a, address, mask=inside)
    for p in tl.static_range(num_slices):
        rank = tl.load(rank_ptr + source * num_slices + p, mask=used, other=0)
        scale = tl.load(scale_ptr + source * num_slices + p, mask=used, other=0.0)
        tl.store(to_rank_ptr + target * num_slices + p, rank, mask=inside)
        tl.store(to_scale_ptr + target * num_slices + p, scale, mask=inside)


def gather_triton(
    slot_K: Tensor, by_slot: tuple[Tensor, Tensor, Tensor], by_tile: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Gathers (address, rank, scale) [L, S, ...] into the same tables [L, K, ...], with zeros where slot_K is
    negative."""
    num_linears, num_slots, num_slices = by_slot[1].shape
    num_tiles = len(slot_K)
    assert by_slot[0].shape == (num_linears, num_slots, 1 + num_slices)
    assert all(
        source.is_contiguous() and target.is_contiguous() for source, target in zip(by_slot, by_tile, strict=True)
    )
    _gather_kernel[(num_linears, triton.cdiv(num_tiles, BLOCK_K))](
        slot_K,
        *by_slot,
        *by_tile,
        num_tiles,
        num_slots=num_slots,
        num_slices=num_slices,
        block_k=BLOCK_K,
        num_warps=2,
    )
