"""The sum of all ranks' rows, the residual's add and the RMS norm in one kernel, over memory that all ranks can read.

Idea: what follows a row-parallel linear is a sum over the ranks and then a norm of each whole row. A program copies its
rows of x + delta into this rank's memory, tells the same program of every other rank, waits for theirs, then reads all
ranks' rows over NVLink, adds them in rank order, and goes on as kernels/rms_norm_triton.py does: one launch and one
crossing of the link, where a collective has launches and a protocol of its own around it. Every rank adds in the same
order and so has the same bits.

Memory of a rank: flags int32 [PROGRAMS, N], then two halves of rows [T, D]. Calls alternate between the halves: a
program that passes call k has heard from all ranks that they have ended call k - 1, so call k + 1 may overwrite what
was read then. Each program counts its calls in device memory, so that captured graphs may be replayed in any order that
is the same on all ranks; the grid is the same for all calls, so that all programs count alike.
Source: one-shot all-reduce, as in TensorRT-LLM and vLLM's custom all-reduce.
"""

# T tokens · D hidden size · N ranks

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.rank_sum import FLAG_BYTES, HALF_BYTES, PROGRAMS, PeerRows
from lorafleet.kernels.rms_norm_triton import ELEMENTS_A_THREAD, MOST_WARPS


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _meet(
    address_ptr: tl.tensor, program: tl.tensor, call: tl.tensor, rank: tl.constexpr, num_ranks: tl.constexpr
) -> None:
    """Waits for this program on every rank. What they wrote before may be read from here on."""
    tl.debug_barrier()  # the whole program has written
    for other in tl.static_range(num_ranks):
        if other != rank:
            theirs = tl.load(address_ptr + other).to(tl.pointer_type(tl.int32)) + program * num_ranks + rank
            tl.atomic_xchg(theirs, call, sem="release", scope="sys")
    for other in tl.static_range(num_ranks):
        if other != rank:
            mine = tl.load(address_ptr + rank).to(tl.pointer_type(tl.int32)) + program * num_ranks + other
            seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
            while seen - call < 0:  # a peer may be a call ahead; the difference survives that the count wraps
                seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


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
    half: tl.constexpr,
    size: tl.constexpr,
    rank: tl.constexpr,
    num_ranks: tl.constexpr,
    flag_bytes: tl.constexpr,
    has_delta: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program) + 1
    tl.store(calls_ptr + program, call)
    if program >= num_rows:
        return
    first = (call & 1) * half
    d = tl.arange(0, block_d)
    inside = d < size
    mine = (tl.load(address_ptr + rank) + flag_bytes).to(tl.pointer_type(dtype)) + first
    for row in tl.range(program, num_rows, tl.num_programs(0), num_stages=1):
        at = row.to(tl.int64) * size + d
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        if has_delta:
            x = (x.to(tl.float32) + tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(tl.multiple_of(mine, 16) + at, x, mask=inside)
    _meet(address_ptr, program, call, rank, num_ranks)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    for row in tl.range(program, num_rows, tl.num_programs(0), num_stages=1):
        at = row.to(tl.int64) * size + d
        before = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        summed = tl.zeros((block_d,), dtype=tl.float32)
        for other in tl.static_range(num_ranks):
            theirs = (tl.load(address_ptr + other) + flag_bytes).to(tl.pointer_type(dtype)) + first
            # Past L1, which may still hold what lay there two calls ago.
            part = tl.load(tl.multiple_of(theirs, 16) + at, mask=inside, other=0.0, cache_modifier=".cg")
            summed += part.to(tl.float32)
        rounded = (summed + before).to(dtype)
        tl.store(residual_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        tl.store(out_ptr + at, (x * inverse * weight).to(dtype), mask=inside)


def rank_sum_add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, eps: float, peers: PeerRows
) -> Tensor:
    """residual += the sum over the ranks of x + delta, in place; returns the norm of that sum. All ranks must call."""
    num_rows, size = x_TD.shape
    assert peers.holds(x_TD)
    assert weight_D.shape == (size,)
    for one_TD in (x_TD, residual_TD) if delta_TD is None else (x_TD, residual_TD, delta_TD):
        assert one_TD.shape == x_TD.shape and one_TD.dtype == x_TD.dtype
        assert one_TD.is_contiguous()
    out_TD = torch.empty_like(x_TD)
    block_d = triton.next_power_of_2(size)
    _rank_sum_kernel[(PROGRAMS,)](
        x_TD,
        delta_TD,
        residual_TD,
        weight_D,
        out_TD,
        peers.address_N,
        peers.calls_P,
        eps,
        num_rows,
        half=HALF_BYTES // x_TD.dtype.itemsize,
        size=size,
        rank=peers.rank,
        num_ranks=peers.size,
        flag_bytes=FLAG_BYTES,
        has_delta=delta_TD is not None,
        block_d=block_d,
        num_warps=min(MOST_WARPS, max(1, block_d // (32 * ELEMENTS_A_THREAD))),
    )
    return out_TD
