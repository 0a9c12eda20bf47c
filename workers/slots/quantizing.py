"""Quantizes A and B to FP8, with a scale for each row of A and each column of B, on the calling thread alone.

The scales are those of the whole matrices. So the ranks of a tensor-parallel group, each with its part, together hold
exactly what one rank would hold.
"""

# R rank · D in features · O out features

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX
from lorafleet.workers.adapters.casting import CHUNK, max_of_columns, max_of_rows

LEAST_SCALE = torch.finfo(torch.float32).tiny  # for rows and columns that are zero, or nearly


def fp8_scales(a_RD: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the divisors of A's rows and of B's columns, float32 [R], with which the largest number just fits."""
    return _scales(max_of_rows(a_RD)), _scales(max_of_columns(b_OR))


def _scales(largest_R: Tensor) -> Tensor:
    return largest_R.float().div_(FP8_MAX).clamp_(min=LEAST_SCALE)


def to_fp8(matrix: Tensor, scale: Tensor) -> Tensor:
    """Returns matrix / scale in FP8, contiguous. The scale is broadcast over the matrix."""
    target = torch.empty(matrix.shape, dtype=FP8)
    scales = scale.expand(matrix.shape)
    for columns in _blocks(matrix.shape[1], CHUNK):
        for rows in _blocks(len(matrix), CHUNK // (columns.stop - columns.start)):
            target[rows, columns] = matrix[rows, columns] / scales[rows, columns]
    return target


def _blocks(size: int, most: int) -> list[slice]:
    return [slice(start, min(start + most, size)) for start in range(0, size, most)]
