"""Computes what follows a row-parallel linear: the sum over the ranks, the residual and the next norm.

On GPUs that reach each other's memory one kernel does all three, in one step or in two (kernels/ranks/rank_sum.py). If
there are too many rows for it, and on other machines, a collective and the norm's kernel do it.
"""

# T tokens · D hidden size

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm, rms_norm
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.ranks.peer_areas import ALIGNMENT, PeerAreas
from lorafleet.kernels.ranks.rank_sum import fits_two_steps, rank_sum_add_rms_norm, two_step_sum_add_rms_norm
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.peer_memory import PeerMemory, open_peer_memory

# Measured by benchmarks/rank_sum.py with two H100s. Two ranks receive as many bytes in two steps as in one, but two
# steps are faster from about 1 MiB on. With more ranks they are used if they save a rank at least what the link carries
# during the second crossing, which takes 1.1 us.
TWO_STEPS_OF_TWO_FROM_BYTES = 1 << 20
SECOND_CROSSING_BYTES = 384 << 10
# Largest sums in one step, in two steps of two ranks, and in two steps of more. Larger ones are left to collectives.
ONE_STEP_BYTES = 2 << 20
TWO_STEP_BYTES_OF_TWO = 64 << 20
TWO_STEP_BYTES = 16 << 20


class RankSum:
    """The sums over the ranks of a group. All of its ranks construct one at the same time."""

    def __init__(self, group: TPGroup, device: torch.device, two_steps_from_bytes: int | None = None) -> None:
        """Sums are done in two steps from two_steps_from_bytes on. The default is what was measured."""
        self._group = group
        self._from_bytes = two_steps_from(group.size) if two_steps_from_bytes is None else two_steps_from_bytes
        self._one_step = open_peer_memory(group, device, ONE_STEP_BYTES)
        self._two_steps: PeerMemory | None = None
        if self._one_step is not None:
            self._two_steps = open_peer_memory(group, device, two_step_area_bytes(group.size))

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
        if is_common:
            assert norm is not None
            two_steps, one_step = self._areas_of_two_steps(x.y_TO), self._areas_of_one_step(x.y_TO)
            if two_steps is not None:
                return two_step_sum_add_rms_norm(x, residual_TD, norm, eps, two_steps, branch)
            if one_step is not None:
                return rank_sum_add_rms_norm(x, residual_TD, norm, eps, one_step, branch)
        # The affine change comes before the sum, so that one collective carries everything.
        total_TD = self._group.all_reduce(apply_affine(x))
        return add_rms_norm(LinearOutput(total_TD), residual_TD, norm, eps, branch, scale)

    def _areas_of_two_steps(self, x_TD: Tensor) -> PeerAreas | None:
        """Returns the memory for the sum of x in two steps, or None if it is smaller or larger than such sums."""
        if self._two_steps is None or x_TD.nbytes < self._from_bytes:
            return None
        return self._two_steps.areas if fits_two_steps(x_TD, self._two_steps.areas) else None

    def _areas_of_one_step(self, x_TD: Tensor) -> PeerAreas | None:
        if self._one_step is None or not self._one_step.areas.holds(x_TD.nbytes):
            return None
        return self._one_step.areas


def two_steps_from(num_ranks: int) -> int:
    """Returns the size in bytes from which on a sum over so many ranks is faster in two steps."""
    if num_ranks <= 2:
        return TWO_STEPS_OF_TWO_FROM_BYTES
    # A rank receives N - 1 times the sum in one step, and 2 (N - 1) / N times the sum in two.
    return SECOND_CROSSING_BYTES * num_ranks // ((num_ranks - 1) * (num_ranks - 2))


def two_step_area_bytes(num_ranks: int) -> int:
    largest = TWO_STEP_BYTES_OF_TWO if num_ranks == 2 else TWO_STEP_BYTES
    return 2 * largest // num_ranks // ALIGNMENT * ALIGNMENT
