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
def sendable(x: tl.tensor, empty: tl.constexpr) -> tl.tensor:
    """Returns x with 0.0 for the number that is never sent."""
    bits_dtype: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    bits = x.to(bits_dtype, bitcast=True)
    return tl.where(bits == empty, 0, bits).to(x.dtype, bitcast=True)


@jit()
def send_to(
    x: tl.tensor,
    to: tl.constexpr,
    address_ptr: tl.tensor,
    half: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    area: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    empty: tl.constexpr,
) -> None:
    """Sends x to the rank `to`: to the given offsets of this rank's area there."""
    bits_dtype: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    theirs = _area(address_ptr, half, to, rank, area, num_ranks, bits_dtype)
    tl.store(theirs + offsets, sendable(x, empty).to(bits_dtype, bitcast=True), mask=inside)


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
    """Sends x to all other ranks."""
    for other in tl.static_range(num_ranks):
        if other != rank:
            send_to(x, other, address_ptr, half, offsets, inside, area, rank, num_ranks, empty)


@jit()
def _read_areas(
    address_ptr: tl.tensor,
    half: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    area: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    bits_dtype: tl.constexpr,
) -> tl.tuple:
    """Returns what is in the other ranks' areas now, in rank order. The loads are all in flight at once."""
    bits: tl.tuple = ()
    for other in tl.static_range(num_ranks):
        if other != rank:
            mine = _area(address_ptr, half, rank, other, area, num_ranks, bits_dtype)
            bits += (tl.load(mine + offsets, mask=inside, other=0, volatile=True),)
    return bits


@jit()
def _any_empty(bits: tl.tuple, count: tl.constexpr, empty: tl.constexpr) -> tl.tensor:
    found = bits[0] == empty
    for index in tl.static_range(1, count):
        found = found | (bits[index] == empty)
    return tl.max(found.to(tl.int32), 0) > 0


@jit()
def receive(
    own: tl.tensor,
    address_ptr: tl.tensor,
    half: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    area: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    empty: tl.constexpr,
) -> tl.tuple:
    """Returns all ranks' numbers in rank order, once they are there; `own` is this rank's. Leaves the memory EMPTY."""
    bits_dtype: tl.constexpr = tl.int16 if own.dtype.primitive_bitwidth == 16 else tl.int32
    bits = _read_areas(address_ptr, half, offsets, inside, area, rank, num_ranks, bits_dtype)
    while _any_empty(bits, num_ranks - 1, empty):
        bits = _read_areas(address_ptr, half, offsets, inside, area, rank, num_ranks, bits_dtype)
    parts: tl.tuple = ()
    for other in tl.static_range(num_ranks):
        if other == rank:
            parts += (own,)
        else:
            mine = _area(address_ptr, half, rank, other, area, num_ranks, bits_dtype)
            tl.store(mine + offsets, tl.full(own.shape, empty, bits_dtype), mask=inside)
            parts += (bits[other if other < rank else other - 1].to(own.dtype, bitcast=True),)
    return parts


@jit()
def receive_pieces(
    address_ptr: tl.tensor,
    half: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    piece: tl.constexpr,
    area: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    empty: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Returns a row of which each rank has sent one piece, once they are there. Leaves the memory EMPTY.

    A piece lies at the offset `first` of its rank's area. `inside` excludes this rank's own piece.
    """
    bits_dtype: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    sender = columns // piece
    areas = tl.where(sender > rank, sender - (rank + 1), sender + (num_ranks - 1 - rank)).to(tl.int64)
    base = tl.multiple_of(tl.load(address_ptr + rank).to(tl.pointer_type(bits_dtype)), 16)
    mine = base + half + first + areas * area + columns % piece
    bits = tl.load(mine, mask=inside, other=0, volatile=True)
    while tl.max((bits == empty).to(tl.int32), 0) > 0:
        bits = tl.load(mine, mask=inside, other=0, volatile=True)
    tl.store(mine, tl.full(bits.shape, empty, bits_dtype), mask=inside)
    return bits.to(dtype, bitcast=True)
