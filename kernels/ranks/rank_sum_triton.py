"""Triton sum over the ranks of rows that each rank sends to all others: see kernels/ranks/rank_sum.py.

Idea: a program puts its rows of x together (kernels/lora/linear_output.py) and sends them. It then takes the other
ranks' rows as they come, adds them in rank order, and continues as kernels/decoder/rms_norm_triton.py does.

Memory: an area is [T, D], like x.
"""

# T tokens · D hidden size

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.decoder.rms_norm_triton import ELEMENTS_A_THREAD, MOST_WARPS, norm_weight, normed
from lorafleet.kernels.extras.affine_triton import scaled_and_shifted
from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.ranks.peer_areas import EMPTY, PROGRAMS, PeerAreas
from lorafleet.kernels.ranks.peer_areas_triton import begin_call, receive, send


@jit()
def own_numbers(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    size: tl.constexpr,
    has_delta: tl.constexpr,
    has_affine: tl.constexpr,
) -> tl.tensor:
    """Returns the columns d of a LinearOutput's row. They are rounded as they are sent, so all ranks add the same."""
    offsets = tl.cast(row, tl.int64) * size + d
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    if has_delta or has_affine:
        total = x.to(tl.float32)
        if has_delta:
            total += tl.load(delta_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if has_affine:
            total = scaled_and_shifted(total, affine_ptr, row, num_rows, d, inside)
        x = total.to(x.dtype)
    return x


# Rows of the table of addresses begin anywhere: their alignment must not cause another compilation.
@jit(do_not_specialize=["affine_ptr", "branch_own_ptr", "own_ptr", "num_rows"])
def _rank_sum_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    branch_weight_ptr: tl.tensor,
    branch_own_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    own_ptr: tl.tensor,
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
    has_affine: tl.constexpr,
    has_branch_norm: tl.constexpr,
    has_own: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0)
    half = begin_call(calls_ptr, program, num_ranks, area)
    d = tl.arange(0, block_d)
    inside = d < size
    for row in tl.range(program, num_rows, most_programs, num_stages=1):
        offsets = tl.cast(row, tl.int64) * size + d
        own = own_numbers(x_ptr, delta_ptr, affine_ptr, row, num_rows, d, inside, size, has_delta, has_affine)
        send(own, address_ptr, half, offsets, inside, area, rank, num_ranks, empty)
    for row in tl.range(program, num_rows, most_programs, num_stages=1):
        offsets = tl.cast(row, tl.int64) * size + d
        own = own_numbers(x_ptr, delta_ptr, affine_ptr, row, num_rows, d, inside, size, has_delta, has_affine)
        summed = tl.zeros((block_d,), dtype=tl.float32)
        parts = receive(own, address_ptr, half, offsets, inside, area, rank, num_ranks, empty)
        for other in tl.static_range(num_ranks):
            summed += parts[other].to(tl.float32)
        if has_branch_norm:
            branch_weight = norm_weight(branch_weight_ptr, branch_own_ptr, row, d, inside, has_own)
            summed = normed(summed.to(dtype), branch_weight, eps, size).to(dtype).to(tl.float32)
        rounded = (summed + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_ptr + offsets, rounded, mask=inside)
        weight = norm_weight(weight_ptr, own_ptr, row, d, inside, has_own)
        tl.store(out_ptr + offsets, normed(rounded, weight, eps, size).to(dtype), mask=inside)


def rank_sum_triton(
    x: LinearOutput,
    residual_TD: Tensor,
    norm: NormWeight,
    out_TD: Tensor,
    eps: float,
    peers: PeerAreas,
    branch: NormWeight | None,
) -> None:
    pointers, constants = launch_arguments(x, residual_TD, norm, out_TD, peers, branch)
    num_rows = len(x.y_TO)
    _rank_sum_kernel[(min(num_rows, PROGRAMS),)](*pointers, eps, num_rows, **constants)


def launch_arguments(
    x: LinearOutput,
    residual_TD: Tensor,
    norm: NormWeight,
    out_TD: Tensor,
    peers: PeerAreas,
    branch: NormWeight | None,
) -> tuple[tuple[Tensor | None, ...], dict[str, int]]:
    """Returns the pointers and the constants that the sums in one step and in two have in common."""
    x_TD, delta_TD, affine_2T, _ = x
    branch_weight_D, branch_own_T = (None, None) if branch is None else (branch.weight, branch.own_T)
    assert branch is None or (branch_own_T is None) == (norm.own_T is None)
    size = x_TD.shape[1]
    block_d = triton.next_power_of_2(size)
    pointers = (
        x_TD,
        delta_TD,
        affine_2T,
        residual_TD,
        branch_weight_D,
        branch_own_T,
        norm.weight,
        norm.own_T,
        out_TD,
        peers.address_N,
        peers.calls_P,
    )
    constants = {
        "area": peers.area_bytes // x_TD.dtype.itemsize,
        "size": size,
        "rank": peers.rank,
        "num_ranks": peers.size,
        "most_programs": PROGRAMS,
        "empty": EMPTY[x_TD.dtype.itemsize],
        "has_delta": delta_TD is not None,
        "has_affine": affine_2T is not None,
        "has_own": norm.own_T is not None,
        "has_branch_norm": branch_weight_D is not None,
        "block_d": block_d,
        "num_warps": min(MOST_WARPS, max(1, block_d // (32 * ELEMENTS_A_THREAD))),
    }
    return pointers, constants
