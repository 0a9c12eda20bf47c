"""4-bit floats, e2m1, with one scale for each group of a row: MXFP4 (32 numbers, powers of two) and NVFP4 (16, e4m3).

A file has two codes in each byte, the first one in the lower bits. The weight on the GPU is NF4Weight with another book
of 16 values. MXFP4's scales are held as bfloat16, which has all powers of two that e8m0 has. NVFP4's are float32, since
its second scale and those of fused linears are multiplied in, and no smaller type has all the products.
Source: OCP Microscaling Formats 1.0.
"""

# D in · O out · G groups of a row · N numbers

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import Sliceable

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOOK = (*MAGNITUDES, *(-m for m in MAGNITUDES))
MX_GROUP = 32
NV_GROUP = 16
NOT_A_NUMBER = 255  # in e8m0


@dataclass(frozen=True, slots=True)
class E2M1Matrix:
    """A whole W in e2m1, as a QuantizedMatrix. Its tensors may lie in files, of which a rank reads its part."""

    packed: Sliceable  # uint8 [O, D / 2]
    scale: Sliceable  # [O, G], as stored
    scales: Callable[[Tensor], Tensor]  # Returns the float32 scales of stored ones.
    shape: tuple[int, int]
    group: int
    book: Tensor
    dtype: torch.dtype = torch.float32  # Values are rounded only to the served dtype.

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Returns the values of W at `place`, float32. Its columns begin and end at even numbers."""
        rows, columns = (slice(0, size) for size in self.shape) if place is ... else place
        code_OD, scale_OD = self.part((rows, columns), 1)
        return self.book[code_OD.int()] * scale_OD

    def part(self, place: tuple[slice, slice], group: int) -> tuple[Tensor, Tensor]:
        """Returns the codes [O, D] at `place`, and the scales of each `group` columns, which lie in one group of W."""
        rows, columns = place[0], slice(*place[1].indices(self.shape[1])[:2])
        assert columns.start % 2 == columns.stop % 2 == columns.start % group == self.group % group == 0
        packed = self.packed[rows, slice(columns.start // 2, columns.stop // 2)]
        first = columns.start // self.group
        stored = self.scale[rows, slice(first, -(-columns.stop // self.group))]
        scale = self.scales(stored).repeat_interleave(self.group // group, dim=1)
        skipped = (columns.start - first * self.group) // group
        return unpacked(packed), scale[:, skipped : skipped + (columns.stop - columns.start) // group]


def e2m1_book(device: torch.device) -> Tensor:
    return torch.tensor(E2M1_BOOK, device=device)


def unpacked(packed: Tensor) -> Tensor:
    """Returns the codes of bytes [..., N] as [..., 2 N]; the first of two is in the lower bits."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def powers_of_two(exponent: Tensor) -> Tensor:
    """Returns the float32 values of e8m0 bytes, which are exponents + 127."""
    return torch.ldexp(torch.ones(exponent.shape, device=exponent.device), exponent.int() - 127)


def quantize_e2m1(values_OD: Tensor, group: int) -> E2M1Matrix:
    """Quantizes to the nearest of the book's values, with the largest magnitude of each group as 6."""
    outputs, inputs = values_OD.shape
    grouped = values_OD.float().view(outputs, -1, group)
    scale_OG = grouped.abs().amax(dim=2).clamp(min=1e-30) / MAGNITUDES[-1]
    scaled = grouped / scale_OG[:, :, None]
    magnitudes = torch.tensor(MAGNITUDES, device=values_OD.device)
    code = torch.bucketize(scaled.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2) + 8 * (scaled < 0)
    pair = code.to(torch.uint8).view(outputs, -1, 2)
    packed, book = pair[:, :, 0] | (pair[:, :, 1] << 4), e2m1_book(values_OD.device)
    return E2M1Matrix(packed, scale_OG, lambda scale: scale, (outputs, inputs), group, book)
