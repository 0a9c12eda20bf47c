"""Triton sum over the ranks of few rows that each rank sends to the others: see kernels/rank_sum.py.

Idea: a program stores its row of x + delta into every other rank's memory, as words of two elements and the number of
the call, and waits until the words that it gets from them have that number too. A word arrives whole, so there is no
fence and no flag to wait for: the row crosses the link once. The price is twice the bytes.

Memory: two halves of [N, T, D / 2] words of 8 bytes, an area for each sender. Calls alternate between the halves, for
the reason given in kernels/rank_sum_read_triton.py.
"""

# T tokens · D hidden size · N ranks

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.rank_sum import FLAG_BYTES, MOST_SENT_BYTES, PROGRAMS, PeerRows
from lorafleet.kernels.rank_sum_read_triton import add_and_norm
from lorafleet.kernels.rms_norm_triton import ELEMENTS_A_THREAD, MOST_WARPS


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _halves_of(word: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    bits = word.to(tl.int32)
    low = (bits & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _area(address: tl.tensor, offset: tl.constexpr, words: tl.tensor) -> tl.tensor:
    return tl.multiple_of((address + offset + words * 8).to(tl.pointer_type(tl.int64)), 16)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]  # triton has no types
def _sent_kernel(
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
    offset: tl.constexpr,
    has_delta: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program) + 1
    tl.store(calls_ptr + program, call)
    if program >= num_rows:
        return
    d = tl.arange(0, block_d)
    inside = d < size
    at = program.to(tl.int64) * size + d
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if has_delta:
        x = (x.to(tl.float32) + tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    low, high = tl.split(x.reshape(block_d // 2, 2))
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    word = (call.to(tl.int64) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
    w = tl.arange(0, block_d // 2)
    own = w < size // 2
    half = (call & 1).to(tl.int64) * num_ranks * area
    row = program * (size // 2) + w
    for other in tl.static_range(num_ranks):
        if other != rank:
            theirs = _area(tl.load(address_ptr + other), offset, half + rank * area)
            tl.store(theirs + row, word, mask=own)
    sum_low = tl.zeros((block_d // 2,), dtype=tl.float32)
    sum_high = tl.zeros((block_d // 2,), dtype=tl.float32)
    address = tl.load(address_ptr + rank)
    for other in tl.static_range(num_ranks):
        got = word
        if other != rank:
            mine = _area(address, offset, half + other * area) + row
            got = tl.load(mine, mask=own, other=0, volatile=True)
            while tl.max(tl.where(own & ((got >> 32).to(tl.int32) != call), 1, 0), 0) > 0:
                got = tl.load(mine, mask=own, other=0, volatile=True)
        got_low, got_high = _halves_of(got, dtype)
        sum_low += got_low
        sum_high += got_high
    summed = tl.join(sum_low, sum_high).reshape(block_d)
    add_and_norm(summed, residual_ptr, weight_ptr, out_ptr, at, d, eps, size)


def rank_sum_by_sending(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    out_TD: Tensor,
    eps: float,
    peers: PeerRows,
) -> None:
    """x: of two-byte elements, an even number of them, and at most PROGRAMS rows and MOST_SENT_BYTES."""
    num_rows, size = x_TD.shape
    block_d = max(2, triton.next_power_of_2(size))
    _sent_kernel[(PROGRAMS,)](
        x_TD,
        delta_TD,
        residual_TD,
        weight_D,
        out_TD,
        peers.address_N,
        peers.calls_P,
        eps,
        num_rows,
        area=2 * MOST_SENT_BYTES // 8,
        size=size,
        rank=peers.rank,
        num_ranks=peers.size,
        offset=FLAG_BYTES + 2 * peers.half_bytes,
        has_delta=delta_TD is not None,
        block_d=block_d,
        num_warps=min(MOST_WARPS, max(1, block_d // (32 * ELEMENTS_A_THREAD))),
    )
