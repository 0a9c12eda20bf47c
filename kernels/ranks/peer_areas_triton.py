"""Triton functions that the kernels over peer areas share: kernels/ranks/peer_areas.py.

Calls alternate between the halves. A program begins its call k + 2 after it has received the other rank's numbers of
call k + 1. That rank sent them after its call k had ended and left the half EMPTY. So one half may be written while
the other is still read, and two halves are enough. Each program counts its calls in device memory, so that captured
graphs may be replayed in any order that is the same on all ranks. A program waits only for the same program of the
other ranks, so it does not matter how many of them run at once.
"""

# N ranks

from __future__ import annotations

import triton.language as tl

from lorafleet.kernels.jit import jit


@jit()
def begin_call(calls_ptr: tl.tensor, program: tl.tensor, num_ranks: tl.constexpr, area: tl.constexpr) -> tl.tensor:
    """Returns the offset of this call's half, in numbers. A program calls it once."""
    call = tl.load(calls_ptr + program)
    tl.debug_barrier()  # no warp may count the call before the last warp has read the count
    tl.store(calls_ptr + program, call + 1)
    return (call & 1).to(tl.int64) * ((num_ranks - 1) * area)


@jit()
def _area(
    address_ptr: tl.tensor,
    half: tl.tensor,
    of: tl.constexpr,
    sender: tl.constexpr,
    area: tl.constexpr,
    num_ranks: tl.constexpr,
    bits_dtype: tl.constexpr,
) -> tl.tensor:
    """Returns the address of the sender's numbers in the memory of rank `of`."""
    first = half + ((sender - of + num_ranks) % num_ranks - 1) * area
    return tl.multiple_of(tl.load(address_ptr + of).to(tl.pointer_type(bits_dtype)) + first, 16)


@jit()
def send(
    x: tl.tensor,
    address_ptr: tl.tensor,
    half: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    area: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    empty: tl.constexpr,
) -> None:
    """Sends x to all other ranks: to the offsets `at` of this rank's area there."""
    bits_dtype: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    bits = x.to(bits_dtype, bitcast=True)
    bits = tl.where(bits == empty, 0, bits)
    for other in tl.static_range(num_ranks):
        if other != rank:
            theirs = _area(address_ptr, half, other, rank, area, num_ranks, bits_dtype)
            tl.store(theirs + offsets, bits, mask=inside)


@jit()
def receive(
    other: tl.constexpr,
    address_ptr: tl.tensor,
    half: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    area: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    empty: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Returns the numbers that the other rank has sent, once all of them are there. Leaves the memory EMPTY."""
    bits_dtype: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    mine = _area(address_ptr, half, rank, other, area, num_ranks, bits_dtype) + offsets
    got = tl.load(mine, mask=inside, other=0, volatile=True)
    while tl.max((got == empty).to(tl.int32), 0) > 0:
        got = tl.load(mine, mask=inside, other=0, volatile=True)
    tl.store(mine, tl.full(got.shape, empty, bits_dtype), mask=inside)
    return got.to(dtype, bitcast=True)
