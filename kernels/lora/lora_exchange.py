"""Triton exchange of P between shrink and expand, for ranks that divide both A and B: kernels/lora/lora_layout.py.

Idea: a program sums shrink's splits of its numbers, sends the sum to all other ranks (kernels/ranks/peer_areas.py),
and takes theirs as they come. It gathers them, or adds them in rank order. P crosses the link once, in one launch on
the stream of shrink and expand. A collective is used instead if an area is too small for P, or if the GPUs do not
reach each other.

Memory: P has the layout that kernels/lora/lora_shrink.py describes. What shrink left unwritten is exchanged too, and
stays meaningless.
"""

# T tokens · C columns of P · K splits of shrink · N parts

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.lora_layout import LoRALayout
from lorafleet.kernels.lora.lora_splits import sum_splits, summed_splits
from lorafleet.kernels.ranks.peer_areas import EMPTY, PROGRAMS, PeerAreas
from lorafleet.kernels.ranks.peer_areas_triton import begin_call, receive, send

BLOCK = 256  # numbers per block


@jit(do_not_specialize=["size"])
def _exchange_kernel(
    p_ptr: tl.tensor,
    out_ptr: tl.tensor,
    address_ptr: tl.tensor,
    calls_ptr: tl.tensor,
    size: tl.tensor,
    num_splits: tl.constexpr,
    gathers: tl.constexpr,
    area: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    most_programs: tl.constexpr,
    empty: tl.constexpr,
    block: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    half = begin_call(calls_ptr, program, num_ranks, area)
    for index in tl.range(program, tl.cdiv(size, block), most_programs, num_stages=1):
        offsets = index * block + tl.arange(0, block)
        own = summed_splits(p_ptr, offsets, size, num_splits)
        send(own, address_ptr, half, offsets, offsets < size, area, rank, num_ranks, empty)
    for index in tl.range(program, tl.cdiv(size, block), most_programs, num_stages=1):
        offsets = index * block + tl.arange(0, block)
        inside = offsets < size
        own = summed_splits(p_ptr, offsets, size, num_splits)
        total = tl.zeros((block,), dtype=tl.float32)
        parts = receive(own, address_ptr, half, offsets, inside, area, rank, num_ranks, empty)
        for other in tl.static_range(num_ranks):
            if gathers:
                tl.store(out_ptr + tl.cast(size, tl.int64) * other + offsets, parts[other], mask=inside)
            else:
                total += parts[other]
        if not gathers:
            tl.store(out_ptr + offsets, total, mask=inside)


def exchanged_splits(p_KTC: Tensor, layout: LoRALayout) -> Tensor:
    """Returns the complete P of all parts, fp32 [N, T, C], made of what shrink() returned. All ranks must call it."""
    peers = layout.peers
    if peers is not None and peers.holds(p_KTC[0].nbytes):
        return _exchanged_by_sending(p_KTC, layout.num_parts, peers)
    return layout.exchanged(sum_splits(p_KTC))


def _exchanged_by_sending(p_KTC: Tensor, num_parts: int, peers: PeerAreas) -> Tensor:
    splits, rows, columns = p_KTC.shape
    out_NTC = torch.empty(num_parts, rows, columns, dtype=torch.float32, device=p_KTC.device)
    size = rows * columns
    _exchange_kernel[(min(triton.cdiv(size, BLOCK), PROGRAMS),)](
        p_KTC,
        out_NTC,
        peers.address_N,
        peers.calls_P,
        size,
        num_splits=splits,
        gathers=num_parts > 1,
        area=peers.area_bytes // p_KTC.dtype.itemsize,
        rank=peers.rank,
        num_ranks=peers.size,
        most_programs=PROGRAMS,
        empty=EMPTY[p_KTC.dtype.itemsize],
        block=BLOCK,
    )
    return out_NTC
