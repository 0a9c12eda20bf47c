"""Stores an adapter's extras in one block of bytes: everything besides A and B.

Extras are vectors, norms, small matrices and whole tables. Each has a name, chosen by whoever adds the tensor, and is
found by that name again, on the host or on the device.

The block lies beside the packed matrices in host memory, pinned if there is a GPU. On a GPU it gets device memory of
its own when the adapter gets a slot (extra_memory.py). On a CPU it is used in place. So plain adapters pay nothing for
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorafleet.protocol.yield_gil import yielding_gil

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has neither bfloat16 nor FP8
ALIGNMENT = 256  # bytes; the GPU's allocator aligns in the same way, so that kernels may load 16 bytes at a time


def aligned(offset: int) -> int:
    """Returns the next offset at which a tensor of a block may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def as_words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Returns a numpy view of the tensor's own memory, as integers of its elements' width.

    Any strides are accepted. Even contiguous() keeps the strides of dimensions with one element, and torch then
    refuses to view floats as bytes.
    """
    words: np.ndarray[Any, Any] = tensor.view(_WORDS[tensor.dtype.itemsize]).numpy()
    return words


def copy_into(block: Tensor, start: int, tensor: Tensor) -> int:
    """Copies the tensor into the block and returns the offset at which it ends.

    Uses numpy, since torch would split the copy over its thread pool (see casting.py).
    """
    source = as_words(tensor)
    end: int = start + source.nbytes
    block.numpy()[start:end].view(source.dtype).reshape(source.shape)[...] = source
    return end


@dataclass(frozen=True, slots=True)
class Place:
    offset: int  # in bytes, from the start of the block
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExtraBlock:
    """The extras of one adapter in one block of bytes."""

    block: Tensor  # uint8
    places: Mapping[str, Place]  # place of each tensor in the block

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], allocate: Callable[[int], Tensor]) -> ExtraBlock:
        """Copies the tensors into a new block.

        Args:
            tensors: Tensors that copy_into accepts.
            allocate: Returns a uint8 tensor of the given number of bytes, which is size_of(tensors).
        """
        places, size = _lay_out(tensors)
        made = cls(allocate(size), places)
        for name, tensor in yielding_gil(tensors.items()):
            copy_into(made.block, places[name].offset, tensor)
        return made

    @staticmethod
    def size_of(tensors: Mapping[str, Tensor]) -> int:
        """Returns the size in bytes of a block of these tensors."""
        return _lay_out(tensors)[1]

    @staticmethod
    def offsets(tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Returns each tensor's offset in bytes from the first of them, if they are adjacent tensors of a block."""
        return {name: place.offset for name, place in _lay_out(tensors)[0].items()}

    @property
    def num_bytes(self) -> int:
        return self.block.numel()

    def get(self, name: str) -> Tensor | None:
        """Returns a view of the block, or None if the adapter has no such tensor."""
        place = self.places.get(name)
        if place is None:
            return None
        own = self.block[place.offset : place.offset + place.num_bytes]
        return own.view(place.dtype).view(place.shape)

    def address(self, name: str) -> int:
        """Returns the tensor's address on the block's device, or 0 if the adapter has no such tensor."""
        place = self.places.get(name)
        return 0 if place is None else self.block.data_ptr() + place.offset

    def in_memory(self, block: Tensor) -> ExtraBlock:
        """Returns the same tensors in `block`, a copy of this block."""
        assert block.shape == self.block.shape
        return replace(self, block=block)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = place = Place(end, tuple(tensor.shape), tensor.dtype)
        end += aligned(place.num_bytes)
    return places, end
