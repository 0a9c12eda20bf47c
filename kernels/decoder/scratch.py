"""Memory that the linears of a model share: values that one GEMM reads and nothing reads after it, and counters.

It is allocated before CUDA graphs are captured, so that the graphs and the steps without graphs use the same memory.
"""

# D in · O out · M tiles

from __future__ import annotations

import torch
from torch import Tensor

MAX_SPLIT_TILES = 1024  # tiles of a product whose inputs are divided among programs


class Scratch:
    """The memory that the linears share. It serves GEMMs of one stream, one after the other."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.empty(0, dtype=dtype, device=device)
        # Counts the programs that have finished their part of a tile. Every GEMM leaves zeros.
        self.arrived_M = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)

    def reserve(self, count: int) -> None:
        """Makes room for `count` numbers. It is called at start only, since it invalidates earlier views."""
        if count > len(self._numbers):
            self._numbers = torch.empty(count, dtype=self._numbers.dtype, device=self._numbers.device)

    def view(self, outputs: int, inputs: int) -> Tensor:
        return self._numbers[: outputs * inputs].view(outputs, inputs)
