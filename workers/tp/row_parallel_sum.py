"""Computes what follows a row-parallel linear: the sum over the ranks, the residual and the next norm.

On GPUs that reach each other's memory one kernel does all three (kernels/ranks/rank_sum.py). If there are too many
rows for it, and on other machines, a collective and the norm's kernel do it.
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

# With two ranks, each receives as much as any algorithm would send it. With more, every row goes to all ranks, and
# larger sums are left to collectives, which divide the work. Measured by benchmarks/rank_sum.py.
AREA_BYTES_OF_TWO = 64 << 20
AREA_BYTES = 2 << 20


class RankSum:
    """The sums over the ranks of a group. All of its ranks construct one at the same time."""

    def __init__(self, group: TPGroup, device: torch.device) -> None:
        self._group = group
        self._peers = open_peer_memory(group, device, _area_bytes(group.size))

    def rms_norm(self, x_TD: Tensor, norm: NormWeight | None, eps: float) -> tuple[Tensor, Tensor]:
        """Returns the sum of every rank's x, and its norm, which is the sum itself if there is no norm."""
        if self._group.size == 1:
            return x_TD, x_TD if norm is None else rms_norm(x_TD, norm, eps)
        total_TD = torch.zeros_like(x_TD)
        return total_TD, self.add_rms_norm(LinearOutput(x_TD), total_TD, norm, eps)

    def add_rms_norm(
        self,
        x: LinearOutput,
        residual_TD: Tensor,
        norm: NormWeight | None,
        eps: float,
        branch: NormWeight | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Computes add_rms_norm of kernels/decoder/rms_norm.py, for the sum of every rank's x. May overwrite x."""
        if self._group.size == 1:
            return add_rms_norm(x, residual_TD, norm, eps, branch, scale)
        is_common = norm is not None and not norm.is_centered and norm.bias_D is None and scale == 1.0
        if is_common and self._peers is not None and self._peers.areas.holds(x.y_TO.nbytes):
            assert norm is not None
            return rank_sum_add_rms_norm(x, residual_TD, norm, eps, self._peers.areas, branch)
        # The affine change comes before the sum, so that one collective carries everything.
        total_TD = self._group.all_reduce(apply_affine(x))
        return add_rms_norm(LinearOutput(total_TD), residual_TD, norm, eps, branch, scale)


def _area_bytes(size: int) -> int:
    return AREA_BYTES_OF_TWO if size == 2 else AREA_BYTES
