"""Reads a linear of 8-bit codes, or of 4-bit floats, whose scales are tensors beside it. Formats differ in the names.

Only the scales are read at once. Codes are read when a rank takes its part, and only those.
"""

# O out features · D in features · R rows of blocks · C columns of blocks

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lorafleet.kernels.quant.e2m1 import (
    MX_GROUP,
    NOT_A_NUMBER,
    NV_GROUP,
    E2M1Matrix,
    e2m1_book,
    powers_of_two,
)
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_matrix import ScaledMatrix, num_blocks
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.checkpoint_format import LinearTensors
from lorafleet.workers.bases.stored_tensors import Stored

# Rows and columns of the numbers that share a scale. None is the whole size.
Block = tuple[int | None, int | None]
BY_TENSOR: Block = (None, None)
BY_ROW: Block = (1, None)
FP8_NAN = 0x7F  # without the sign


@dataclass(frozen=True, slots=True)
class Codes:
    """A tensor in a file. Its parts are checked as they are read."""

    path: str
    stored: Stored
    dtype: torch.dtype

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        part = self.stored[place]
        if part.dtype != self.dtype:
            raise ConfigError(
                f"{self.path} is stored as {part.dtype}, but config.json requires {self.dtype}. Correct config.json, "
                "or export the checkpoint again.",
                "model",
            )
        if self.dtype == FP8 and ((part.view(torch.uint8) & FP8_NAN) == FP8_NAN).any():
            raise ConfigError(f"{self.path} contains NaN. Download or export the checkpoint again.", "model")
        return part


def scaled_matrix(
    linear: LinearTensors, code_dtype: torch.dtype, block: Block, scale_leaf: str, factor: float = 1.0
) -> ScaledMatrix:
    """Returns the weight of `weight` and `scale_leaf`. Raises ConfigError if they are damaged or do not match.

    Scales are floats, or e8m0 as bytes. They are multiplied by `factor`.
    """
    codes = Codes(linear.path("weight"), linear.stored("weight"), code_dtype)
    return scaled_codes(codes, block, linear.path(scale_leaf), linear.stored(scale_leaf), factor)


def scaled_codes(codes: Codes, block: Block, scale_path: str, scales: Stored, factor: float = 1.0) -> ScaledMatrix:
    """Returns the weight of these codes and scales, as scaled_matrix() does."""
    shape = matrix_shape(codes.path, codes.stored)
    size = min(block[0] or shape[0], shape[0]), min(block[1] or shape[1], shape[1])
    wanted = num_blocks(shape, size)
    scale_shape = scales.get_shape()
    if prod(scale_shape) != prod(wanted) or _without_ones(scale_shape) != _without_ones(wanted):
        raise ConfigError(
            f"{scale_path} has shape {scale_shape}, but one scale for each {size[0]} x {size[1]} numbers of a weight "
            f"of {shape[0]} x {shape[1]} requires {list(wanted)}. Correct config.json, or export the checkpoint again.",
            "model",
        )
    stored = scales[...]
    if not stored.is_floating_point() and stored.dtype != torch.uint8:
        raise ConfigError(
            f"{scale_path} is stored as {stored.dtype}; scales are floats. Export the checkpoint again.", "model"
        )
    scale = exponent_values(scale_path, stored) if stored.dtype == torch.uint8 else stored.float()
    return ScaledMatrix(codes, _checked(scale_path, scale).view(wanted) * factor, shape, size)


def mxfp4_matrix(linear: LinearTensors, packed_leaf: str, scale_leaf: str) -> E2M1Matrix:
    """Returns the weight of e2m1 codes with one e8m0 scale for each 32 numbers."""
    path = linear.path(scale_leaf)

    def scales(stored: Tensor) -> Tensor:
        return exponent_values(path, stored)

    matrix_shape(path, linear.stored(scale_leaf))
    dtype = linear.stored(scale_leaf)[:1, :1].dtype
    if dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ConfigError(f"{path} is stored as {dtype}; MXFP4 has exponents of 8 bits. Correct config.json.", "model")
    return _e2m1_matrix(linear, packed_leaf, Codes(path, linear.stored(scale_leaf), dtype), scales, MX_GROUP)


def nvfp4_matrix(
    linear: LinearTensors, packed_leaf: str, scale_leaf: str, second_leaf: str, second_divides: bool
) -> E2M1Matrix:
    """Returns the weight of e2m1 codes with one e4m3 scale for each 16 numbers, and a second one for all.

    The second one divides the others in compressed-tensors, and multiplies them in ModelOpt.
    """
    second = _checked(linear.path(second_leaf), linear.tensor(second_leaf, 1).float())
    if second.numel() != 1 or not (second > 0).all():
        raise ConfigError(
            f"{linear.path(second_leaf)} must be one positive number. Export the checkpoint again.", "model"
        )
    second = second.view(())

    def scales(stored: Tensor) -> Tensor:
        first = stored.float()
        return _checked(linear.path(scale_leaf), first / second if second_divides else first * second)

    stored = Codes(linear.path(scale_leaf), linear.stored(scale_leaf), FP8)
    return _e2m1_matrix(linear, packed_leaf, stored, scales, NV_GROUP)


def _e2m1_matrix(
    linear: LinearTensors, packed_leaf: str, stored: Codes, scales: Callable[[Tensor], Tensor], group: int
) -> E2M1Matrix:
    outputs, half = matrix_shape(linear.path(packed_leaf), linear.stored(packed_leaf))
    shape = stored.stored.get_shape()
    if shape != [outputs, 2 * half // group] or 2 * half % group:
        raise ConfigError(
            f"{stored.path} has shape {shape}, but one scale for each {group} of {2 * half} columns requires "
            f"{[outputs, 2 * half // group]}. Export the checkpoint again.",
            "model",
        )
    if packed_leaf != "weight" and "weight" in linear:
        raise ConfigError(
            f"{linear.path('weight')} is beside {linear.path(packed_leaf)}. Export the checkpoint again.", "model"
        )
    packed = Codes(linear.path(packed_leaf), linear.stored(packed_leaf), torch.uint8)
    book = e2m1_book(linear.stored(packed_leaf)[:1, :1].device)
    return E2M1Matrix(packed, stored, scales, (outputs, 2 * half), group, book)


def matrix_shape(path: str, stored: Stored) -> tuple[int, int]:
    """Returns the shape of a matrix. Raises ConfigError if the tensor is empty, or no matrix."""
    shape = stored.get_shape()
    if len(shape) != 2 or 0 in shape:
        raise ConfigError(
            f"{path} has shape {shape} instead of two dimensions of at least one. Export the checkpoint again.", "model"
        )
    return shape[0], shape[1]


def exponent_values(path: str, stored: Tensor) -> Tensor:
    """Returns the float32 values of e8m0 numbers or of their bytes. Raises ConfigError if one is NaN."""
    exponent = stored.view(torch.uint8)  # e8m0 or its bytes
    if (exponent == NOT_A_NUMBER).any():
        raise ConfigError(f"{path} contains NaN. Download or export the checkpoint again.", "model")
    return powers_of_two(exponent)


def _checked(path: str, scale: Tensor) -> Tensor:
    if not (torch.isfinite(scale) & (scale >= 0)).all():
        raise ConfigError(
            f"{path} contains a scale that is negative, infinite or NaN. Download or export the checkpoint again.",
            "model",
        )
    return scale


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
