"""Triton sum over the ranks of rows that each rank sends to all others: see kernels/rank_sum.py.

Idea: a program stores its rows of x + delta into every other rank's memory and waits until none of the numbers that it
gets from them is EMPTY any more. No fence and no flag: the row crosses the link once, and a number is either there or
not. What was read is made EMPTY again for later. Then it adds in rank order, and goes on as kernels/rms_norm_triton.py
does.

Memory: two halves of [N - 1, T, D], an area for each sender; calls alternate between them. A program begins its call
k + 2 when it has got the other rank's rows of call k + 1, which that rank sent after its call k had ended and left the
half EMPTY: so one may be written while the other is still read, and two are enough. Each program counts its calls in
device memory, so that captured graphs may be replayed in any order that is the same on all ranks. A program waits only
for the same program of the other ranks, so it does not matter how many of them run at once.
"""

# T tokens · D hidden size · N ranks

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.rank_sum import EMPTY, PROGRAMS, PeerRows
from lorafleet.kernels.rms_norm_triton import ELEMENTS_A_THREAD, MOST_WARPS


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _own_row(
    x_ptr: tl.tensor, delta_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor, has_delta: tl.constexpr
) -> tl.tensor:
    """x + delta, rounded as it is sent: all ranks add the same numbers."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if has_delta:
        x = (x.to(tl.float32) + tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]  # triton has no types
def _rank_sum_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    address_ptr: tl.tensor,
    calls_ptr: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    area: tl.constexpr,
    size: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    most_programs: tl.constexpr,
    empty: tl.constexpr,
    has_delta: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    bits_dtype: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program)
    tl.debug_barrier()  # no warp may count before the last one has read
    tl.store(calls_ptr + program, call + 1)
    half = (call & 1).to(tl.int64) * ((num_ranks - 1) * area)
    d = tl.arange(0, block_d)
    inside = d < size
    for row in tl.range(program, num_rows, most_programs, num_stages=1):
        at = row.to(tl.int64) * size + d
        bits = _own_row(x_ptr, delta_ptr, at, inside, has_delta).to(bits_dtype, bitcast=True)
        bits = tl.where(bits == empty, 0, bits)
        for other in tl.static_range(num_ranks):
            if other != rank:
                area_there = half + ((rank - other + num_ranks) % num_ranks - 1) * area
                theirs = tl.load(address_ptr + other).to(tl.pointer_type(bits_dtype)) + area_there
                tl.store(tl.multiple_of(theirs, 16) + at, bits, mask=inside)
    for row in tl.range(program, num_rows, most_programs, num_stages=1):
        at = row.to(tl.int64) * size + d
        own = _own_row(x_ptr, delta_ptr, at, inside, has_delta)
        summed = tl.zeros((block_d,), dtype=tl.float32)
        for other in tl.static_range(num_ranks):
            part = own
            if other != rank:
                area_here = half + ((other - rank + num_ranks) % num_ranks - 1) * area
                mine = tl.load(address_ptr + rank).to(tl.pointer_type(bits_dtype)) + area_here
                mine = tl.multiple_of(mine, 16) + at
                got = tl.load(mine, mask=inside, other=0, volatile=True)
                while tl.max((got == empty).to(tl.int32), 0) > 0:
                    got = tl.load(mine, mask=inside, other=0, volatile=True)
                tl.store(mine, tl.full((block_d,), empty, bits_dtype), mask=inside)
                part = got.to(dtype, bitcast=True)
            summed += part.to(tl.float32)
        rounded = (summed + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_ptr + at, rounded, mask=inside)
        total = rounded.to(tl.float32)
        weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(total * total, 0) / size + eps)
        tl.store(out_ptr + at, (total * inverse * weight).to(dtype), mask=inside)


def rank_sum_triton(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    out_TD: Tensor,
    eps: float,
    peers: PeerRows,
) -> None:
    num_rows, size = x_TD.shape
    block_d = triton.next_power_of_2(size)
    _rank_sum_kernel[(min(num_rows, PROGRAMS),)](
        x_TD,
        delta_TD,
        residual_TD,
        weight_D,
        out_TD,
        peers.address_N,
        peers.calls_P,
        eps,
        num_rows,
        area=peers.area_bytes // x_TD.dtype.itemsize,
        size=size,
        rank=peers.rank,
        num_ranks=peers.size,
        most_programs=PROGRAMS,
        empty=EMPTY[x_TD.dtype.itemsize],
        has_delta=delta_TD is not None,
        block_d=block_d,
        num_warps=min(MOST_WARPS, max(1, block_d // (32 * ELEMENTS_A_THREAD))),
    )
