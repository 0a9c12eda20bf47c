"""The output of a linear with adapters, in parts. The kernel that reads it adds the parts in the same pass."""

# T tokens · O out · K splits of the inputs

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SplitSums(NamedTuple):
    """An output y that is divided into K sums, each over a part of the inputs (kernels/linear/split_linear.py)."""

    part_KTO: Tensor  # float32
    early: bool  # whether the reader is launched before they are ready (programmatic dependent launch)


class LinearOutput(NamedTuple):
    """The output scale * (y + delta) + bias. All rows are contiguous."""

    y_TO: Tensor  # If there are sums, it is only the memory for their total, with y's shape and dtype.
    delta_TO: Tensor | None = None  # what adapters add to y; None if that is nothing, or in y already
    # Addresses of each token's own scale and bias of the output (kernels/extras/affine.py). None if no token has any,
    # or if they are in y already, as on a CPU.
    affine_2T: Tensor | None = None
    sums: SplitSums | None = None  # There is no delta beside them, and no affine change.

    def added(self) -> Tensor:
        """Returns y + delta for readers on a CPU, rounded to nothing shorter than float32."""
        assert self.affine_2T is None and self.sums is None
        return self.y_TO if self.delta_TO is None else self.y_TO.float() + self.delta_TO.float()

    def check(self, reads_sums: bool = False) -> None:
        """Checks what the readers' kernels assume; their wrappers call it. `reads_sums` says that the reader adds the
        sums."""
        assert self.y_TO.is_contiguous()
        if self.delta_TO is not None:
            assert self.delta_TO.shape == self.y_TO.shape and self.delta_TO.dtype == self.y_TO.dtype
            assert self.delta_TO.is_contiguous()
        if self.affine_2T is not None:
            assert self.affine_2T.shape == (2, self.y_TO.shape[0]) and self.affine_2T.is_contiguous()
        if self.sums is not None:
            assert reads_sums and self.delta_TO is None and self.affine_2T is None
            assert self.sums.part_KTO.shape[1:] == self.y_TO.shape and self.sums.part_KTO.dtype == torch.float32
            assert self.sums.part_KTO.is_contiguous()

    @property
    def read(self) -> Tensor:
        """The tensor that a reader of sums loads: the sums, or y."""
        return self.y_TO if self.sums is None else self.sums.part_KTO

    @property
    def num_sums(self) -> int:
        """The number of sums in `read`, 1 for y itself."""
        return 1 if self.sums is None else len(self.sums.part_KTO)

    @property
    def early(self) -> bool:
        return self.sums is not None and self.sums.early
