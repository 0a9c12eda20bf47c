"""Triton sum over the ranks in two steps, with the residual's add and the norm: see kernels/ranks/rank_sum.py.

Idea: each rank adds one piece of every row, D / N columns wide. A program handles the same rows on all ranks:

1. It sends the piece of each other rank to that rank.
2. It takes the other ranks' numbers of its own piece, adds them in rank order, and sends the sum to all of them. The
   residual is already in the sum, which is rounded once, as in one step. With a norm of the branch the residual comes
   later, since that norm needs the whole row.
3. It takes the other pieces of its rows, and computes the norm.

So N ranks receive 2 (N - 1) / N rows for each row, instead of N - 1. Pieces of columns give all programs the same work.
If each rank added whole rows, one program of N would receive and send N - 1 rows, and the others would wait for it.
The normed row is not sent: it would cost as many bytes of the link again, and a norm reads memory that is ten times as
fast.

Memory: an area is [2, T, D / N]: a sender's numbers of step 1, then those of step 2. A row's numbers always lie at the
same place and belong to the same program. A rank that sends in step 1 of call k + 2 has received all pieces of call
k + 1. Each was sent after its sender's call k had ended, which left both steps' numbers EMPTY. Step 2 writes to a rank
later than step 1. So two halves are enough, as in kernels/ranks/peer_areas_triton.py.
"""

# T tokens · D hidden size · N ranks

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.decoder.rms_norm_triton import norm_weight, normed
from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.ranks.peer_areas import PROGRAMS, PeerAreas
from lorafleet.kernels.ranks.peer_areas_triton import begin_call, receive, receive_pieces, send, send_to, sendable
from lorafleet.kernels.ranks.rank_sum_triton import launch_arguments, own_numbers


# Rows of the table of addresses begin anywhere: their alignment must not cause another compilation.
@jit(do_not_specialize=["affine_ptr", "branch_own_ptr", "own_ptr", "num_rows"])
def _two_step_sum_kernel(
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
    block_piece: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    piece: tl.constexpr = size // num_ranks
    second: tl.constexpr = area // 2  # where the numbers of step 2 begin
    program = tl.program_id(0)
    half = begin_call(calls_ptr, program, num_ranks, area)
    c = tl.arange(0, block_piece)
    in_piece = c < piece
    for row in tl.range(program, num_rows, most_programs, num_stages=1):
        offsets = tl.cast(row, tl.int64) * piece + c
        pieces: tl.tuple = ()  # all are loaded before the first is sent
        for other in tl.static_range(num_ranks):
            numbers = own_numbers(
                x_ptr, delta_ptr, affine_ptr, row, num_rows, other * piece + c, in_piece, size, has_delta, has_affine
            )
            pieces += (numbers,)
        for other in tl.static_range(num_ranks):
            if other != rank:
                numbers = pieces[other]
                send_to(numbers, other, address_ptr, half, offsets, in_piece, area, rank, num_ranks, empty)

    own_d = rank * piece + c
    for row in tl.range(program, num_rows, most_programs, num_stages=1):
        offsets = tl.cast(row, tl.int64) * piece + c
        own_offsets = tl.cast(row, tl.int64) * size + own_d
        own = own_numbers(x_ptr, delta_ptr, affine_ptr, row, num_rows, own_d, in_piece, size, has_delta, has_affine)
        summed = tl.zeros((block_piece,), dtype=tl.float32)
        parts = receive(own, address_ptr, half, offsets, in_piece, area, rank, num_ranks, empty)
        for other in tl.static_range(num_ranks):
            summed += parts[other].to(tl.float32)
        if not has_branch_norm:
            summed += tl.load(residual_ptr + own_offsets, mask=in_piece, other=0.0).to(tl.float32)
        sent = sendable(summed.to(dtype), empty)
        send(sent, address_ptr, half, second + offsets, in_piece, area, rank, num_ranks, empty)
        tl.store(out_ptr + own_offsets, sent, mask=in_piece)

    tl.debug_barrier()  # other warps read what this warp has written to out
    d = tl.arange(0, block_d)
    inside = d < size
    is_own = d // piece == rank
    for row in tl.range(program, num_rows, most_programs, num_stages=1):
        offsets = tl.cast(row, tl.int64) * size + d
        first = second + tl.cast(row, tl.int64) * piece
        theirs = receive_pieces(
            address_ptr, half, first, d, inside & (d // piece != rank), piece, area, rank, num_ranks, empty, dtype
        )
        whole = tl.where(is_own, tl.load(out_ptr + offsets, mask=is_own, other=0.0), theirs)
        if has_branch_norm:
            branch_weight = norm_weight(branch_weight_ptr, branch_own_ptr, row, d, inside, has_own)
            branch = normed(whole, branch_weight, eps, size).to(dtype).to(tl.float32)
            whole = (branch + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_ptr + offsets, whole, mask=inside)
        weight = norm_weight(weight_ptr, own_ptr, row, d, inside, has_own)
        tl.store(out_ptr + offsets, normed(whole, weight, eps, size).to(dtype), mask=inside)


def two_step_sum_triton(
    x: LinearOutput,
    residual_TD: Tensor,
    norm: NormWeight,
    out_TD: Tensor,
    eps: float,
    peers: PeerAreas,
    branch: NormWeight | None,
) -> None:
    pointers, constants = launch_arguments(x, residual_TD, norm, out_TD, peers, branch)
    num_rows, size = x.y_TO.shape
    block_piece = triton.next_power_of_2(size // peers.size)
    _two_step_sum_kernel[(min(num_rows, PROGRAMS),)](*pointers, eps, num_rows, block_piece=block_piece, **constants)
