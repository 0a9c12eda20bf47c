"""The output of a linear with adapters, in parts. The kernel that reads it adds the parts in the same pass."""

# T tokens · O out

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearOutput(NamedTuple):
    """The output scale * (y + delta) + bias. All rows are contiguous."""

    y_TO: Tensor
    delta_TO: Tensor | None = None  # what adapters add to y; None if that is nothing, or in y already
    # Addresses of each token's own scale and bias of the output (kernels/extras/affine.py). None if no token has any,
    # or if they are in y already, as on a CPU.
    affine_2T: Tensor | None = None

    def added(self) -> Tensor:
        """Returns y + delta for readers on a CPU, rounded to nothing shorter than float32."""
        assert self.affine_2T is None
        return self.y_TO if self.delta_TO is None else self.y_TO.float() + self.delta_TO.float()

    def check(self) -> None:
        """Checks what the readers' kernels assume; their wrappers call it."""
        assert self.y_TO.is_contiguous()
        if self.delta_TO is not None:
            assert self.delta_TO.shape == self.y_TO.shape and self.delta_TO.dtype == self.y_TO.dtype
            assert self.delta_TO.is_contiguous()
        if self.affine_2T is not None:
            assert self.affine_2T.shape == (2, self.y_TO.shape[0]) and self.affine_2T.is_contiguous()
