"""The sum of all ranks' rows, the residual's add and the RMS norm, in one kernel over memory that all ranks can write.

A row-parallel linear is followed by a sum over the ranks and then by a norm of each whole row, so every rank needs the
whole sum. There are two ways to get it, which give the same bits on all ranks:

- In one step, each rank sends its rows to all others, which add them. The rows cross the link once. A rank receives
  N - 1 rows for each row.
- In two steps, each rank adds 1/N of the columns and sends the sum to all others. The numbers cross the link twice, one
  crossing after the other. A rank receives 2 (N - 1) / N rows for each row: 1.5 instead of 3 with four ranks. With two
  ranks there is no difference in bytes.

All ranks add in the same order (kernels/ranks/peer_areas.py has the memory).
Source: one-shot and two-shot all-reduce, as in TensorRT-LLM and FlashInfer.
"""

# T tokens · D hidden size · N ranks

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.ranks.peer_areas import PeerAreas


def rank_sum_add_rms_norm(
    x: LinearOutput,
    residual_TD: Tensor,
    norm: NormWeight,
    eps: float,
    peers: PeerAreas,
    branch: NormWeight | None = None,
) -> Tensor:
    """Adds the sum of x over the ranks to the residual in place, in one step, and returns the norm of the result.

    All ranks must call it. `branch` is as in kernels/decoder/rms_norm.py, and applies to the ranks' sum.
    """
    from lorafleet.kernels.ranks.rank_sum_triton import rank_sum_triton  # triton is optional on a CPU

    assert peers.holds(x.y_TO.nbytes)
    out_TD = _checked_out(x, residual_TD)
    rank_sum_triton(x, residual_TD, norm, out_TD, eps, peers, branch)
    return out_TD


def two_step_sum_add_rms_norm(
    x: LinearOutput,
    residual_TD: Tensor,
    norm: NormWeight,
    eps: float,
    peers: PeerAreas,
    branch: NormWeight | None = None,
) -> Tensor:
    """Computes what rank_sum_add_rms_norm does, with the same bits, in two steps.

    The residual must have the same bits on all ranks, since each column's is added on one of them. `peers` must not be
    the memory of sums in one step.
    """
    from lorafleet.kernels.ranks.two_step_sum_triton import two_step_sum_triton  # triton is optional on a CPU

    assert fits_two_steps(x.y_TO, peers)
    out_TD = _checked_out(x, residual_TD)
    two_step_sum_triton(x, residual_TD, norm, out_TD, eps, peers, branch)
    return out_TD


def fits_two_steps(x_TD: Tensor, peers: PeerAreas) -> bool:
    """Returns whether the ranks can have equal parts of the columns, and an area has room for both steps' numbers."""
    return x_TD.shape[1] % peers.size == 0 and peers.holds(2 * x_TD.nbytes // peers.size)


def _checked_out(x: LinearOutput, residual_TD: Tensor) -> Tensor:
    """Checks the shapes and dtypes, and returns memory for the norm."""
    x.check()
    assert residual_TD.shape == x.y_TO.shape and residual_TD.dtype == x.y_TO.dtype
    assert residual_TD.is_contiguous()
    return torch.empty_like(x.y_TO)
