"""A matrix of 8-bit codes, e4m3 or int8, and the scales that multiply them.

A scale belongs to a block of rows and columns: to the whole matrix, to a row, or to 128 x 128 numbers. A rank takes the
codes of its part and one scale for each of its rows and groups of columns, so a part may begin and end inside a block.
"""

# D in · O out · G groups of columns · R rows of blocks · C columns of blocks

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import Sliceable
from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A whole W = code * scale, as a QuantizedMatrix."""

    code: Sliceable  # e4m3 or int8 [O, D]: a tensor, or one in a file, of which a rank reads its part
    scale_RC: Tensor  # float32
    shape: tuple[int, int]
    block: tuple[int, int]  # Rows and columns of a block; the last block of each may be smaller.

    def __post_init__(self) -> None:
        assert tuple(self.scale_RC.shape) == num_blocks(self.shape, self.block)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Returns the values of W at `place`, float32."""
        rows, columns = (slice(0, size) for size in self.shape) if place is ... else place
        scale_OD = self.scales(rows, columns, 1)
        return self.code[rows, columns].to(scale_OD.device).float() * scale_OD

    def scales(self, rows: slice, columns: slice, group: int) -> Tensor:
        """Returns the scales of these rows [O, G], one for each `group` columns, all of which lie in one block."""
        device = self.scale_RC.device
        row_O = torch.arange(*rows.indices(self.shape[0]), device=device) // self.block[0]
        first, end, _ = columns.indices(self.shape[1])
        column_G = torch.arange(first, end, group, device=device) // self.block[1]
        return self.scale_RC[row_O[:, None], column_G[None, :]]


def num_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def quantize_rows(values_OD: Tensor) -> ScaledMatrix:
    """Quantizes each row to e4m3 so that its largest magnitude becomes e4m3's largest number.

    x [T, D] is quantized by token in the same way.
    """
    return quantize_groups(values_OD, FP8, values_OD.shape[1])


def quantize_groups(values_OD: Tensor, code_dtype: torch.dtype, group: int) -> ScaledMatrix:
    """Quantizes each group of columns so that its largest magnitude becomes the largest code."""
    outputs, inputs = values_OD.shape
    largest = FP8_MAX if code_dtype == FP8 else 127.0
    grouped = values_OD.float().view(outputs, -1, group)
    # It is a product, as torch's quotient by a number is on a GPU, so that a CPU quantizes to the same bits.
    scale_OG = grouped.abs().amax(dim=2).clamp(min=1e-12) * (1 / largest)
    scaled = (grouped / scale_OG[:, :, None]).clamp_(-largest, largest).flatten(1)
    code_OD = scaled.to(FP8) if code_dtype == FP8 else scaled.round_().to(code_dtype)
    return ScaledMatrix(code_OD, scale_OG, (outputs, inputs), (1, group))
