"""Memory that the linears of a model share for values that one GEMM reads and nothing reads after it.

It is allocated before CUDA graphs are captured, so that the graphs and the steps without graphs use the same memory.
"""

# D in · O out

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """The memory that the linears share. It serves GEMMs of one stream, one after the other."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, count: int) -> None:
        """Makes room for `count` numbers. It is called at start only, since it invalidates earlier views."""
        if count > len(self._numbers):
            self._numbers = torch.empty(count, dtype=self._numbers.dtype, device=self._numbers.device)

    def view(self, outputs: int, inputs: int) -> Tensor:
        return self._numbers[: outputs * inputs].view(outputs, inputs)
