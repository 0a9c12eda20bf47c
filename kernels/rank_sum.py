"""The sum of all ranks' rows, the residual's add and the RMS norm in one kernel, over memory that all ranks can read.

What follows a row-parallel linear is a sum over the ranks and then a norm of each whole row. Few rows are sent to the
other ranks word by word (kernels/rank_sum_sent_triton.py), which crosses the link once; more are put where the others
read them (kernels/rank_sum_read_triton.py), which crosses it twice but with half the bytes. Every rank adds in the same
order and so has the same bits. The two take turns as they like: they count their calls together.
Source: one-shot all-reduce, as in TensorRT-LLM and vLLM's custom all-reduce; words with flags are NCCL's LL protocol.
"""

# T tokens · D hidden size · N ranks

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROGRAMS = 256  # two for each SM: all run at once, on all ranks, so none waits for one that cannot start
MOST_RANKS = 8
FLAG_BYTES = PROGRAMS * MOST_RANKS * 4
MOST_SENT_BYTES = 512 << 10  # of rows; with the flags, twice as much on the link


@dataclass(frozen=True, slots=True)
class PeerRows:
    """A rank's memory: FLAG_BYTES of flags; two halves of half_bytes for rows that others read; two halves of N areas
    for words that each rank sends. Zero at first.

    address_N: int64, where each rank's memory lies, in this process's addresses. calls_P: int32 [PROGRAMS], this rank's
    own, zero at first.
    """

    rank: int
    size: int
    address_N: Tensor
    calls_P: Tensor
    half_bytes: int

    @staticmethod
    def bytes(size: int, half_bytes: int) -> int:
        return FLAG_BYTES + 2 * half_bytes + 2 * size * 2 * MOST_SENT_BYTES

    def holds(self, x_TD: Tensor) -> bool:
        return x_TD.nbytes <= self.half_bytes


def rank_sum_add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, eps: float, peers: PeerRows
) -> Tensor:
    """residual += the sum over the ranks of x + delta, in place; returns the norm of that sum. All ranks must call."""
    from lorafleet.kernels.rank_sum_read_triton import rank_sum_by_reading
    from lorafleet.kernels.rank_sum_sent_triton import rank_sum_by_sending

    assert peers.holds(x_TD)
    for one_TD in (x_TD, residual_TD) if delta_TD is None else (x_TD, residual_TD, delta_TD):
        assert one_TD.shape == x_TD.shape and one_TD.dtype == x_TD.dtype
        assert one_TD.is_contiguous()
    out_TD = torch.empty_like(x_TD)
    is_small = x_TD.nbytes <= MOST_SENT_BYTES and len(x_TD) <= PROGRAMS
    in_words = x_TD.dtype.itemsize == 2 and x_TD.shape[1] % 2 == 0
    run = rank_sum_by_sending if is_small and in_words else rank_sum_by_reading
    run(x_TD, delta_TD, residual_TD, weight_D, out_TD, eps, peers)
    return out_TD
