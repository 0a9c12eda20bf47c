"""What a linear of the base model holds: a weight that can be multiplied, plain or quantised.

Who multiplies (kernels/lora/apply_lora.py, workers/models/layers.py) asks for products alone and does not know how the
numbers are kept.
"""

# T tokens · D in · O out

from __future__ import annotations

from types import EllipsisType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BaseWeight(Protocol):
    """W [O, D], this rank's part of it."""

    @property
    def num_outputs(self) -> int: ...

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """x @ W.T + bias."""

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        """y += x @ W.T, in place; returns y. For many tokens: in the same pass where that costs nothing."""

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        """Rows of W as they are served, in the serving dtype. A plain weight's are its own memory."""


class QuantisedMatrix(Protocol):
    """A whole W, quantised, from which ranks take their parts. Indexed, it gives values, as a tensor in a file does."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor: ...


class PlainWeight(nn.Module):
    def __init__(self, weight_OD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_OD, requires_grad=False)

    @classmethod
    def empty(cls, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> PlainWeight:
        return cls(torch.empty(outputs, inputs, dtype=dtype, device=device))

    @property
    def num_outputs(self) -> int:
        return len(self.weight)

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TD, self.weight, bias_O)

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        return y_TO.addmm_(x_TD, self.weight.T)

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        return self.weight.data[rows]
