"""The parts of a model's parameters that a checkpoint's tensors fill, on one tensor-parallel rank.

Tensors are read, decoded and quantized some rows at a time. So the numbers on the way take a few MiB of memory however
large a tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, QuantizedWeight, Scheme
from lorafleet.workers.bases.stored_tensors import Stored, TensorInMemory

CHUNK = 1 << 18  # numbers that are read at a time
ALIGNMENT = 64  # Chunks begin at multiples of it, so that NF4's blocks of 64 numbers never cross from one to the next.


@dataclass(frozen=True, slots=True)
class PlainPart:
    """This rank's part of one tensor in the checkpoint."""

    held: Tensor  # A parameter, or rows of one.
    places: list[tuple[slice, ...]]  # Where its rows are in the whole tensor, in order.
    whole_shape: list[int]
    added: float = 0.0  # Added to the checkpoint's values, in held's dtype.

    def fill(self, stored: Stored) -> None:
        row = 0
        for place in self.places:
            for part in _parts_of(place, prod(self.held.shape[1:])):
                values = torch.atleast_1d(stored[part])
                self.held[row : row + len(values)].copy_(values)
                row += len(values)
        assert row == len(self.held)
        if self.added:
            self.held.add_(self.added)

    def fill_randomly(self, generator: torch.Generator) -> None:
        self.held.normal_(std=0.02, generator=generator)

    def values(self) -> Tensor:
        return self.held - self.added if self.added else self.held


@dataclass(frozen=True, slots=True)
class StackedPart:
    """A part of a tensor of all experts. It is filled one expert after another, so that the host holds one at a time.

    `read` returns one expert's values in held's layout, however the file stores them.
    """

    held_E: Tensor  # A parameter, or rows of one, for each expert.
    whole_shape: list[int]
    read: Callable[[Stored, int], Tensor]  # Takes the stored tensor and an expert.

    def fill(self, stored: Stored) -> None:
        for expert, held in enumerate(self.held_E):
            held.copy_(self.read(stored, expert))


@dataclass(frozen=True, slots=True)
class QuantizedPart:
    """The rows of a quantized weight from first_row on. It works like PlainPart."""

    weight: QuantizedWeight
    scheme: Scheme
    is_rounded: bool  # the checkpoint is plain, and its values are quantized as they are read
    device: torch.device
    first_row: int
    num_rows: int
    places: list[tuple[slice, ...]]
    whole_shape: list[int]

    def fill(self, stored: Stored) -> None:
        """Fills the rows from the stored matrix.

        Whole rows of a plain matrix are quantized, so that blocks do not depend on what ranks hold.
        """
        row = self.first_row
        for rows, columns in self.places:
            for chunk in _chunks(rows, self.whole_shape[1]):
                self._fill_chunk(row, stored, chunk, columns)
                row += chunk.stop - chunk.start
        assert row == self.first_row + self.num_rows

    def fill_randomly(self, generator: torch.Generator) -> None:
        columns = self.places[0][1]
        num_columns = columns.stop - columns.start
        for chunk in _chunks(slice(0, self.num_rows), num_columns):
            shape = chunk.stop - chunk.start, num_columns
            values_OD = torch.empty(shape, dtype=self.weight.dtype, device=self.device)
            matrix = self._quantized(values_OD.normal_(std=0.02, generator=generator))
            self.weight.fill(self.first_row + chunk.start, matrix, (slice(0, shape[0]), slice(0, num_columns)))

    def values(self) -> Tensor:
        return self.weight.dequantized(slice(self.first_row, self.first_row + self.num_rows))

    def _fill_chunk(self, row: int, stored: Stored, chunk: slice, columns: slice) -> None:
        if not self.is_rounded:
            self.weight.fill(row, stored, (chunk, columns))
            return
        first = chunk.start - chunk.start % ALIGNMENT
        matrix = self._quantized(stored[slice(first, chunk.stop), slice(0, self.whole_shape[1])])
        self.weight.fill(row, matrix, (slice(chunk.start - first, chunk.stop - first), columns))

    def _quantized(self, values_OD: Tensor) -> QuantizedMatrix:
        return self.scheme.quantize(values_OD.to(self.device, self.weight.dtype))


def quantized_rows(stored: Stored, scheme: Scheme, dtype: torch.dtype) -> Iterator[tuple[slice, QuantizedMatrix]]:
    """Yields the rows of a plain matrix [out, in], quantized from `dtype` as a QuantizedPart does it.

    The first row of each is a multiple of ALIGNMENT.
    """
    outputs, inputs = stored.get_shape()
    for rows in _chunks(slice(0, outputs), inputs):
        yield rows, scheme.quantize(stored[rows, slice(0, inputs)].to(dtype))


def _parts_of(place: tuple[slice, ...], num_columns: int) -> Iterator[tuple[slice, ...]]:
    """Divides the place by _chunks() of its rows. A single number, which has no dimension, is one part."""
    if not place:
        yield place
        return
    for chunk in _chunks(place[0], num_columns):
        yield chunk, *place[1:]


def _chunks(rows: slice, num_columns: int) -> Iterator[slice]:
    """Divides the rows into runs of about CHUNK numbers that end at multiples of ALIGNMENT rows."""
    step = max(1, CHUNK // max(1, num_columns) // ALIGNMENT) * ALIGNMENT
    first = rows.start
    while first < rows.stop:
        end = min(rows.stop, (first // step + 1) * step)
        yield slice(first, end)
        first = end


@dataclass(frozen=True, slots=True)
class StackedRounding:
    """A part of a plain tensor of all experts, which are quantized as they are read, one after another."""

    parts_E: tuple[QuantizedPart, ...]
    whole_shape: list[int]
    read: Callable[[Stored, int], Tensor]  # Returns an expert's whole projection [out, in].

    def fill(self, stored: Stored) -> None:
        for expert, part in enumerate(self.parts_E):
            part.fill(TensorInMemory(self.read(stored, expert)))


ModelPart = PlainPart | QuantizedPart


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The parameters that one tensor of a file fills."""

    parts: tuple[ModelPart | StackedPart | StackedRounding, ...]
    fills: tuple[str, ...]  # Names of the model's parts that are complete with it.

    @property
    def is_rounded(self) -> bool:
        """Whether the tensor's plain values are quantized as they are read."""
        return any(
            isinstance(part, StackedRounding) or (isinstance(part, QuantizedPart) and part.is_rounded)
            for part in self.parts
        )
