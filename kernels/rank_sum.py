"""The sum of all ranks' rows, the residual's add and the RMS norm in one kernel, over memory that all ranks can write.

What follows a row-parallel linear is a sum over the ranks and then a norm of each whole row, so every rank needs the
others' rows anyway. Each sends its own to all (kernels/rank_sum_triton.py): the rows cross the link once, and they
themselves say that they have come. Every rank adds in the same order and so has the same bits.
Source: one-shot all-reduce by Lamport's flags (a value that is never sent), as in TensorRT-LLM and FlashInfer.
"""

# T tokens · D hidden size · N ranks · P programs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROGRAMS = 512  # of a launch at most; row r is always program r % PROGRAMS's
MOST_RANKS = 8
# Never sent, by the size of a number: -0.0 in half precision, two of them (a number that means as little) in float32.
EMPTY = {2: -0x8000, 4: -0x7FFF8000}


@dataclass(frozen=True, slots=True)
class PeerRows:
    """A rank's memory: two halves of N - 1 areas of area_bytes, one area for each other rank's rows; EMPTY at first.

    address_N: int64, where each rank's memory lies, in this process's addresses. calls_P: int32 [PROGRAMS], this rank's
    own, zero at first. All calls must have rows of one size and dtype.
    """

    rank: int
    size: int
    address_N: Tensor
    calls_P: Tensor
    area_bytes: int

    @staticmethod
    def bytes(size: int, area_bytes: int) -> int:
        return 2 * (size - 1) * area_bytes

    def holds(self, x_TD: Tensor) -> bool:
        return x_TD.nbytes <= self.area_bytes


def rank_sum_add_rms_norm(
    x_TD: Tensor, delta_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, eps: float, peers: PeerRows
) -> Tensor:
    """residual += the sum over the ranks of x + delta, in place; returns the norm of that sum. All ranks must call."""
    from lorafleet.kernels.rank_sum_triton import rank_sum_triton

    assert peers.holds(x_TD)
    for one_TD in (x_TD, residual_TD) if delta_TD is None else (x_TD, residual_TD, delta_TD):
        assert one_TD.shape == x_TD.shape and one_TD.dtype == x_TD.dtype
        assert one_TD.is_contiguous()
    out_TD = torch.empty_like(x_TD)
    rank_sum_triton(x_TD, delta_TD, residual_TD, weight_D, out_TD, eps, peers)
    return out_TD
