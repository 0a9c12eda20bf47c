"""A or B of all experts of a layer, which stays where it was read until it is copied to where it is served.

An adapter on experts can have gigabytes in thousands of tensors. So nothing is stacked, transposed, filled up or cast
before: write() does all of that in one copy.
"""

# E experts · G groups (those of A, or projections of B) · X rows · Y columns

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.casting import CHUNK, as_words

WHOLE = slice(None)


@dataclass(frozen=True, slots=True)
class FactorPiece:
    """Matrices of some experts in some groups."""

    expert: int  # The first expert.
    group: int  # The first group.
    values_EGXY: Tensor  # Any float dtype and any strides.


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """A matrix for each expert and group. The pieces do not overlap. Numbers that are in no piece are 0."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype  # Of what write() fills. The pieces may have others.
    pieces: Sequence[FactorPiece]

    @classmethod
    def of(cls, values_EGXY: Tensor) -> ExpertFactors:
        experts, groups, rows, columns = values_EGXY.shape
        return cls((experts, groups, rows, columns), values_EGXY.dtype, [FactorPiece(0, 0, values_EGXY)])

    @property
    def num_values(self) -> int:
        experts, groups, rows, columns = self.shape
        return experts * groups * rows * columns

    def part(self, rows: slice = WHOLE, columns: slice = WHOLE) -> ExpertFactors:
        """Returns these rows and columns of each matrix, whose pieces must reach as far."""
        pieces = [replace(piece, values_EGXY=piece.values_EGXY[..., rows, columns]) for piece in self.pieces]
        experts, groups, num_rows, num_columns = self.shape
        shape = experts, groups, len(range(num_rows)[rows]), len(range(num_columns)[columns])
        return ExpertFactors(shape, self.dtype, pieces)

    def filled_up(self, dtype: torch.dtype, rows: int | None = None, columns: int | None = None) -> ExpertFactors:
        """Returns the matrices in this dtype and with so many rows and columns, of which the further ones are 0.

        By default, they have those that they had.
        """
        experts, groups, own_rows, own_columns = self.shape
        shape = experts, groups, own_rows if rows is None else rows, own_columns if columns is None else columns
        return ExpertFactors(shape, dtype, self.pieces)

    def of_expert(self, expert: int) -> Tensor:
        """Returns one expert's matrices in float32, [G, X, Y]."""
        found_GXY = torch.zeros(self.shape[1:])
        for piece in self.pieces:
            if piece.expert <= expert < piece.expert + len(piece.values_EGXY):
                values_GXY = piece.values_EGXY[expert - piece.expert]
                groups, rows, columns = values_GXY.shape
                found_GXY[piece.group : piece.group + groups, :rows, :columns] = values_GXY
        return found_GXY

    def write(self, target_EGXY: Tensor) -> None:
        """Fills a tensor of this shape and dtype, on the calling thread alone."""
        if sum(piece.values_EGXY.numel() for piece in self.pieces) < self.num_values:
            as_words(target_EGXY)[...] = 0
        for piece in yielding_gil(self.pieces):
            experts, groups, rows, columns = piece.values_EGXY.shape
            own = slice(piece.expert, piece.expert + experts), slice(piece.group, piece.group + groups)
            _copy(target_EGXY[(*own, slice(rows), slice(columns))], piece.values_EGXY)


def _copy(target_EGXY: Tensor, source_EGXY: Tensor) -> None:
    is_cast = source_EGXY.dtype is not target_EGXY.dtype
    if not is_cast and source_EGXY.stride(3) == 1:
        as_words(target_EGXY)[...] = as_words(source_EGXY)
        return
    for block in _blocks(source_EGXY.shape):
        if is_cast:
            target_EGXY[block] = source_EGXY[block]
        else:  # numpy is faster than torch here
            as_words(target_EGXY[block])[...] = as_words(source_EGXY[block])


def _blocks(shape: Sequence[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Yields parts of at most CHUNK numbers, as torch copies on the calling thread alone.

    A part has as many experts as possible: PEFT stores B of stacked experts with the experts as its last dimension, so
    a part is a piece of memory that fits a cache. Copied whole, each of its cache lines would be read for each expert.
    """
    experts, groups, rows, columns = shape
    experts_at_once = max(1, min(experts, CHUNK // max(1, groups * columns)))
    rows_at_once = max(1, CHUNK // max(1, experts_at_once * groups * columns))
    for expert in range(0, experts, experts_at_once):
        for row in range(0, rows, rows_at_once):
            yield slice(expert, expert + experts_at_once), WHOLE, slice(row, row + rows_at_once)
