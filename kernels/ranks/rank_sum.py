"""The sum of all ranks' rows, the residual's add and the RMS norm in one kernel, over memory that all ranks can write.

What follows a row-parallel linear is a sum over the ranks and then a norm of each whole row, so every rank needs the
others' rows anyway. Each sends its own to all (kernels/ranks/peer_areas.py), so the rows cross the link once. Every
rank adds in the same order and so has the same bits. Source: one-shot all-reduce, as in TensorRT-LLM and FlashInfer.
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
    """residual += the sum over the ranks of x, in place; returns the norm of that sum. All ranks must call.

    branch: as in kernels/decoder/rms_norm.py, of the ranks' sum.
    """
    from lorafleet.kernels.ranks.rank_sum_triton import rank_sum_triton  # triton is optional on a CPU

    x.check()
    assert peers.holds(x.y_TO.nbytes)
    assert residual_TD.shape == x.y_TO.shape and residual_TD.dtype == x.y_TO.dtype
    assert residual_TD.is_contiguous()
    out_TD = torch.empty_like(x.y_TO)
    rank_sum_triton(x, residual_TD, norm, out_TD, eps, peers, branch)
    return out_TD
