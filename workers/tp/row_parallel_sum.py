"""What follows a row-parallel linear: the sum over the ranks, the residual and the next norm.

On GPUs that reach each other's memory one kernel does all three (kernels/ranks/rank_sum.py); where the rows are too
many for it, and on other machines, a collective and the kernel of the norm.
"""

# T tokens · D hidden size

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm, rms_norm
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.ranks.rank_sum import rank_sum_add_rms_norm
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.peer_memory import open_peer_memory

# Of two ranks each gets as much as any algorithm would send it; of more, every row goes to all, and larger sums are
# left to collectives, which divide the work. Measured by benchmarks/rank_sum.py.
AREA_BYTES_OF_TWO = 64 << 20
AREA_BYTES = 2 << 20


class RankSum:
    """All ranks of the group make one at once."""

    def __init__(self, group: TPGroup, device: torch.device) -> None:
        self._group = group
        self._peers = open_peer_memory(group, device, _area_bytes(group.size))

    def rms_norm(self, x_TD: Tensor, norm: NormWeight, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of every rank's x, and its norm."""
        if self._group.size == 1:
            return x_TD, rms_norm(x_TD, norm, eps)
        total_TD = torch.zeros_like(x_TD)
        return total_TD, self.add_rms_norm(LinearOutput(x_TD), total_TD, norm, eps)

    def add_rms_norm(
        self, x: LinearOutput, residual_TD: Tensor, norm: NormWeight, eps: float, branch: NormWeight | None = None
    ) -> Tensor:
        """As kernels/decoder/rms_norm.py's, of every rank's x. May overwrite x."""
        if self._group.size == 1:
            return add_rms_norm(x, residual_TD, norm, eps, branch)
        if self._peers is not None and self._peers.areas.holds(x.y_TO.nbytes):
            return rank_sum_add_rms_norm(x, residual_TD, norm, eps, self._peers.areas, branch)
        # Before the sum, so that one collective carries all of it.
        total_TD = self._group.all_reduce(apply_affine(x))
        return add_rms_norm(LinearOutput(total_TD), residual_TD, norm, eps, branch)


def _area_bytes(size: int) -> int:
    return AREA_BYTES_OF_TWO if size == 2 else AREA_BYTES
