"""Finds a tensor's largest magnitudes, and casts it, on the calling thread alone.

torch would split both over its thread pool, which the engine uses. Beside a busy engine loop the two would wait for
each other, and a load would take ten times as long. numpy's reductions use one thread and release the GIL.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

# For each size in bytes: the unsigned and the signed integer, and a mask of all bits but the sign.
_INTEGERS = {
    2: (np.uint16, np.int16, 0x7FFF),
    4: (np.uint32, np.int32, 0x7FFFFFFF),
    8: (np.uint64, np.int64, 2**63 - 1),
}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has neither bfloat16 nor FP8
CHUNK = 32_768  # elements; torch's own threshold for using its pool
ROWS_AT_ONCE = 64  # reduced together, since numpy starts anew for every row of a few columns


def max_magnitude(tensor: Tensor) -> Tensor:
    """Returns max |x| as a scalar of the tensor's dtype, or NaN or infinity if the tensor has one.

    The tensor must not be empty. Among floats of one sign, magnitudes have the order of their bits, and NaN and
    infinity are the largest. Seen as signed integers, positive floats are on top. Seen as unsigned integers, negative
    floats are.
    """
    return _magnitudes(tensor.contiguous(), None)


def max_of_rows(matrix: Tensor) -> Tensor:
    """Returns max |x| of each row, as max_magnitude does."""
    return _magnitudes(matrix.contiguous(), 1)


def max_of_columns(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    wide = matrix.contiguous().view(-1, math.gcd(rows, ROWS_AT_ONCE) * columns)
    return _magnitudes(_magnitudes(wide, 0).view(-1, columns), 0)


def _magnitudes(tensor: Tensor, axis: int | None) -> Tensor:
    size = tensor.dtype.itemsize
    unsigned, signed, magnitude_bits = _INTEGERS[size]
    bits = as_words(tensor)
    of_negative = bits.view(unsigned).max(axis) & magnitude_bits
    largest = np.maximum(bits.view(signed).max(axis), of_negative.astype(signed))
    return torch.from_numpy(np.asarray(largest)).view(tensor.dtype)


def as_words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Returns a numpy view of the tensor's own memory, as integers of its elements' width.

    Any strides are accepted. Even contiguous() keeps the strides of dimensions with one element, and torch then
    refuses to view floats as bytes.
    """
    words: np.ndarray[Any, Any] = tensor.view(_WORDS[tensor.dtype.itemsize]).numpy()
    return words


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix in that dtype with contiguous rows. A tensor that already is so is returned itself."""
    source = tensor if tensor.stride(1) == 1 else tensor.contiguous()
    if source.dtype is dtype:
        return source
    target = torch.empty(source.shape, dtype=dtype)
    whole = source.is_contiguous()
    pairs = [(target.view(-1), source.view(-1))] if whole else zip(target, source, strict=True)
    for to, row in pairs:
        for start in range(0, len(row), CHUNK):
            to[start : start + CHUNK] = row[start : start + CHUNK]
    return target
