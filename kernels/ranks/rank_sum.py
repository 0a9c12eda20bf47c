"""The sum of all ranks' rows, the residual's add and the RMS norm, in one kernel over memory that all ranks can write.

A row-parallel linear is followed by a sum over the ranks and then by a norm of each whole row, so every rank needs the
others' rows anyway. Each rank sends its rows to all others (kernels/ranks/peer_areas.py), so they cross the link once.
Every rank adds in the same order, and so gets the same bits.
Source: one-shot all-reduce, as in TensorRT-LLM and FlashInfer.
"""

# T tokens · D hidden size

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
    """Adds the sum of x over the ranks to the residual in place, and returns the norm of the result.

    All ranks must call it. `branch` is as in kernels/decoder/rms_norm.py, and applies to the ranks' sum.
    """
    from lorafleet.kernels.ranks.rank_sum_triton import rank_sum_triton  # triton is optional on a CPU

    x.check()
    assert peers.holds(x.y_TO.nbytes)
    assert residual_TD.shape == x.y_TO.shape and residual_TD.dtype == x.y_TO.dtype
    assert residual_TD.is_contiguous()
    out_TD = torch.empty_like(x.y_TO)
    rank_sum_triton(x, residual_TD, norm, out_TD, eps, peers, branch)
    return out_TD
