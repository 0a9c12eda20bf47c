"""Reads weights of integer codes that are packed into int32, so that a rank reads only its part of each tensor.

The library formats differ in the direction in which codes are packed, in their order within an int32, and in how zeros
are stored. PackedInts has these as fields; gptq_format.py, awq_format.py and compressed_tensors_format.py set them.
"""

# D in · O out · G groups of a row · M, N sizes of a stored tensor

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from lorafleet.kernels.quant.int_weight import Bits, IntMatrix
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.checkpoint_format import LinearTensors
from lorafleet.workers.bases.stored_tensors import Stored

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class PackedInts:
    """A whole W in a file, as a QuantizedMatrix.

    `is_transposed` is about codes, scales and zeros: if set, they are stored as [D, O] and [G, O].
    """

    name: str  # of the linear, for errors
    shape: tuple[int, int]  # O, D
    bits: Bits
    code: Stored  # int32
    code_axis: int  # of the stored tensor, along which codes are packed
    scale: Stored
    zero: Stored | None  # int32, packed along the outputs; None means 2 ** (bits - 1)
    group_D: Tensor  # int64
    is_transposed: bool
    order: tuple[int, ...] | None = None  # the numbers in an int32, from its lowest bits on; None means 0, 1, 2 …
    zero_offset: int = 0  # added to every int32 of zeros before they are unpacked
    is_checked_symmetric: bool = False  # config.json says that all zeros are 2 ** (bits - 1)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        if place is ...:
            place = tuple(slice(0, size) for size in self.shape)
        rows, columns = place
        return self.part((rows, columns)).values()

    def part(self, place: tuple[slice, slice]) -> IntMatrix:
        """Reads this part of every tensor. Raises ConfigError if its numbers are damaged."""
        rows, columns = place
        groups = slice(0, self.scale.get_shape()[0 if self.is_transposed else 1])
        code_OD = self._read(self.code, (rows, columns), self.code_axis).contiguous()
        scale_OG = self._oriented(self.scale[self._oriented_place((rows, groups))])
        if not bool(scale_OG.isfinite().all()):
            raise ConfigError(f"{self.name}: its scales are not all finite. Quantize the model again.", "model")
        zero_OG = None
        if self.zero is not None:
            zero_OG = self._read(self.zero, (rows, groups), 1 if self.is_transposed else 0, self.zero_offset)
            middle = 1 << (self.bits - 1)
            if self.is_checked_symmetric:
                if bool((zero_OG != middle).any()):
                    raise ConfigError(
                        f"{self.name}: quantization_config says sym or zero_point=false, which makes every zero "
                        f"{middle}, but qzeros has {int(zero_OG[zero_OG != middle][0])}. That, or GPTQ's "
                        "checkpoint_format (gptq stores zeros minus one, gptq_v2 does not) is wrong; correct "
                        "config.json.",
                        "model",
                    )
                zero_OG = None
        return IntMatrix(code_OD, scale_OG.contiguous(), zero_OG, self.group_D[columns].to(code_OD.device), self.bits)

    def _read(self, stored: Stored, place: tuple[slice, slice], packed_axis: int, offset: int = 0) -> Tensor:
        """Returns the numbers at `place` of W or of its groups, uint8. Reads only the int32s that hold them."""
        count = 32 // self.bits
        own = list(self._oriented_place(place))
        wanted = own[packed_axis]
        own[packed_axis] = slice(wanted.start // count, -(-wanted.stop // count))
        packed_MN = stored[tuple(own)]
        if packed_MN.dtype != torch.int32:
            raise ConfigError(f"{self.name}: its codes or zeros are {packed_MN.dtype}; they must be int32.", "model")
        numbers = unpacked(packed_MN + offset, self.bits, packed_axis, self.order)
        return self._oriented(numbers.narrow(packed_axis, wanted.start % count, wanted.stop - wanted.start))

    def _oriented_place(self, place: tuple[slice, slice]) -> tuple[slice, slice]:
        return (place[1], place[0]) if self.is_transposed else place

    def _oriented(self, tensor: Tensor) -> Tensor:
        return tensor.T if self.is_transposed else tensor


def unpacked(packed_MN: Tensor, bits: Bits, axis: int, order: tuple[int, ...] | None) -> Tensor:
    """Returns the numbers in int32s, uint8. `axis` becomes 32 / bits times as long.

    Args:
        order: see PackedInts.
    """
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed_MN.device)
    fields = torch.empty(count, *packed_MN.shape, dtype=torch.uint8, device=packed_MN.device)
    for field, number in enumerate(order or range(count)):
        fields[number] = (packed_MN >> shifts[field]) & ((1 << bits) - 1)
    return torch.movedim(fields, 0, axis + 1).flatten(axis, axis + 1)


def packed_rows(number_MN: Tensor, bits: Bits) -> Tensor:
    """Returns the numbers of each row in int32s, the first ones in the lowest bits. N is a multiple of 32 / bits."""
    count = 32 // bits
    fields = number_MN.to(torch.int32).unflatten(1, (-1, count))
    packed_MN = torch.zeros(fields.shape[:2], dtype=torch.int32, device=number_MN.device)
    for field in range(count):
        packed_MN |= fields[:, :, field] << (field * bits)
    return packed_MN


def dtype_of_matrix(name: str, stored: Stored) -> torch.dtype:
    """Returns the dtype of a stored matrix of floats. Raises ConfigError if it is another tensor."""
    shape = stored.get_shape()
    dtype = stored[:1, :1].dtype if len(shape) == 2 else None
    if dtype not in FLOATS:
        raise ConfigError(
            f"{name} is {dtype} with shape {shape}; it must be a matrix in float16, bfloat16 or float32. Quantize the "
            "model again.",
            "model",
        )
    return dtype


def stored_groups(linear: LinearTensors, leaf: str, inputs: int) -> Tensor:
    """Reads each column's group, int64 [D]. Raises ConfigError if the tensor has not one integer for each column."""
    stored = linear.stored(leaf)
    shape = stored.get_shape()
    dtype = stored[(slice(0, 1),)].dtype if shape == [inputs] and inputs else None
    if dtype not in INTEGERS:
        raise ConfigError(
            f"{linear.path(leaf)} is {dtype} with shape {shape}; it must have one integer for each of {inputs} inputs. "
            "quantization_config's bits is wrong, or the file is damaged.",
            "model",
        )
    return stored[...].cpu().long()


def num_ordered_groups(linear_name: str, stored: Tensor | None, groups: int, size: int | None) -> int:
    """Returns IntScheme.ordered_groups, 0 if groups are runs of `size` columns. The arguments and errors are those of
    group_of_columns()."""
    if stored is None or torch.equal(stored, _runs(len(stored), size)):
        return 0
    group_of_columns(linear_name, stored, len(stored), groups, size)  # Memory is allocated by this number of groups.
    return groups


def _runs(inputs: int, size: int | None) -> Tensor:
    return torch.arange(inputs) // min(size or inputs, inputs)  # A size from config.json may have more than 64 bits.


def group_of_columns(linear_name: str, stored: Tensor | None, inputs: int, groups: int, size: int | None) -> Tensor:
    """Returns each column's group, int64 [D]. Raises ConfigError if it is not one of the groups.

    Args:
        stored: stored_groups() of the file, or None if they are runs of `size` columns.
        size: columns of a group in config.json; None means whole rows.
    """
    expected = -(-inputs // (size or max(inputs, 1)))
    if groups != expected or not inputs:
        raise ConfigError(
            f"{linear_name} has {groups} groups of scales for {inputs} inputs; quantization_config's group_size="
            f"{size or -1} requires {expected}. Correct config.json, or export the checkpoint again.",
            "model",
        )
    if stored is None:
        return _runs(inputs, size)
    first, last = int(stored.min()), int(stored.max())
    if not 0 <= first <= last < groups:
        raise ConfigError(
            f"{linear_name}: g_idx has values from {first} to {last}; it must assign each of {inputs} inputs to one of "
            f"{groups} groups. Quantize the model again.",
            "model",
        )
    return stored
