"""What a linear with adapters gives its reader, who puts it together in the pass that reads it anyway."""

# T tokens · O out

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearOutput(NamedTuple):
    """scale * (y + delta) + bias, all rows contiguous.

    delta: what adapters add to y; None: nothing, or it is in y already. affine_2T: each token's own scale and bias of
    the output, see kernels/extras/affine.py; None: nobody has any, or they are in y already, as on a CPU.
    """

    y_TO: Tensor
    delta_TO: Tensor | None = None
    affine_2T: Tensor | None = None

    def added(self) -> Tensor:
        """For readers on a CPU: y + delta, rounded to nothing shorter than float32."""
        assert self.affine_2T is None
        return self.y_TO if self.delta_TO is None else self.y_TO.float() + self.delta_TO.float()

    def check(self) -> None:
        """For readers' wrappers: what their kernels take for granted."""
        assert self.y_TO.is_contiguous()
        if self.delta_TO is not None:
            assert self.delta_TO.shape == self.y_TO.shape and self.delta_TO.dtype == self.y_TO.dtype
            assert self.delta_TO.is_contiguous()
        if self.affine_2T is not None:
            assert self.affine_2T.shape == (2, self.y_TO.shape[0]) and self.affine_2T.is_contiguous()
