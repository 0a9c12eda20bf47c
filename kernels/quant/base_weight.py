"""The weight of a linear of the base model, plain or quantized, which can be multiplied.

A scheme (NF4Scheme, ScaledScheme, E2M1Scheme, IntScheme) says how one linear is quantized. It creates the weight that
holds the linear on the GPU, and quantizes plain values.

The callers (kernels/lora/apply_lora.py, workers/models/layers.py) ask for products only and do not know how the
numbers are stored.
"""

# T tokens · D in · O out

from __future__ import annotations

from types import EllipsisType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.decoder.scratch import Scratch


class BaseWeight(Protocol):
    """A weight W [O, D], or this rank's part of it."""

    @property
    def num_outputs(self) -> int: ...

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """Returns x @ W.T + bias, [T, O]."""

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        """Adds x @ W.T to y in place, and returns y.

        It is meant for many tokens, and adds in the same pass if that costs nothing.
        """

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        """Returns rows of W as they are served, in the serving dtype. A plain weight returns its own memory."""


class Sliceable(Protocol):
    """A tensor, or one in a file, of which only the indexed part is read."""

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor: ...


class QuantizedMatrix(Protocol):
    """A whole quantized W, from which ranks take their parts. Indexing returns values, as for a tensor in a file."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor: ...


class QuantizedWeight(BaseWeight, Protocol):
    """A BaseWeight that is filled with parts of quantized matrices."""

    dtype: torch.dtype  # the served dtype

    def fill(self, first_row: int, matrix: QuantizedMatrix, place: tuple[slice, slice]) -> None:
        """Fills the rows from first_row on with the part of the matrix at `place`."""


class Scheme(Protocol):
    """Describes how one linear is quantized. Schemes are frozen dataclasses, which are compared by their fields."""

    @property
    def name(self) -> str:
        """Names the scheme in logs and errors, such as "nf4"."""

    def refusal(self, inputs: int) -> str | None:
        """Returns why a weight with this number of inputs on each rank cannot be held, and a remedy, or None."""

    def empty(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, scratch: Scratch
    ) -> QuantizedWeight:
        """Returns an empty weight of this rank's sizes. `scratch` is shared by all weights of the model."""

    def quantize(self, values_OD: Tensor) -> QuantizedMatrix:
        """Quantizes plain values, also random ones for measurements of speed."""

    def common(self, other: Scheme) -> Scheme | None:
        """Returns a scheme whose weight holds matrices of both schemes without loss, or None if there is none."""


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

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        return self.weight.data[rows]
