"""The sum of all ranks' rows, the residual's add and the RMS norm in one kernel, over memory that all ranks can write.

What follows a row-parallel linear is a sum over the ranks and then a norm of each whole row, so every rank needs the
others' rows anyway. Each sends its own to all (kernels/peer_areas.py), so the rows cross the link once. Every rank adds
in the same order and so has the same bits.
Source: one-shot all-reduce, as in TensorRT-LLM and FlashInfer.
"""

# T tokens · D hidden size

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.peer_areas import PeerAreas


def rank_sum_add_rms_norm(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    peers: PeerAreas,
    branch_weight_D: Tensor | None = None,
) -> Tensor:
    """residual += the sum over the ranks of x + delta, in place; returns the norm of that sum. All ranks must call.

    branch_weight: as in kernels/rms_norm.py, of the ranks' sum.
    """
    from lorafleet.kernels.rank_sum_triton import rank_sum_triton  # triton is optional on a CPU

    assert peers.holds(x_TD.nbytes)
    for one_TD in (x_TD, residual_TD) if delta_TD is None else (x_TD, residual_TD, delta_TD):
        assert one_TD.shape == x_TD.shape and one_TD.dtype == x_TD.dtype
        assert one_TD.is_contiguous()
    out_TD = torch.empty_like(x_TD)
    rank_sum_triton(x_TD, delta_TD, residual_TD, weight_D, out_TD, eps, peers, branch_weight_D)
    return out_TD
