"""What an adapter has besides A and B, in one block of bytes: vectors, norms, small matrices, whole tables, by name.

It lies beside the packed matrices in host memory (pinned where there is a GPU). On a GPU it gets memory of its own when
the adapter gets a slot (extra_memory.py); on a CPU it is used in place. So plain adapters pay nothing for it. Whoever
adds a tensor chooses its name and finds it again by that name, here or on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.adapters.yield_gil import giving_way

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has neither bfloat16 nor FP8
ALIGNMENT = 256  # bytes; what the GPU's allocator gives, so that kernels may load 16 bytes at a time


def aligned(offset: int) -> int:
    """Where the next tensor of a block may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def as_words(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's own memory, as integers of its elements' width. Of any strides: those of a dimension of one element
    torch keeps in contiguous() too, and then views no float as bytes."""
    words: np.ndarray[Any, Any] = tensor.view(_WORDS[tensor.dtype.itemsize]).numpy()
    return words


def copy_into(block: Tensor, start: int, tensor: Tensor) -> int:
    """By numpy: torch would split it over its thread pool, see casting.py. Returns where it ends in the block."""
    source = as_words(tensor)
    end: int = start + source.nbytes
    block.numpy()[start:end].view(source.dtype).reshape(source.shape)[...] = source
    return end


@dataclass(frozen=True, slots=True)
class Place:
    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExtraBlock:
    """block: uint8. places: of each tensor, in it."""

    block: Tensor
    places: Mapping[str, Place]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], allocate: Callable[[int], Tensor]) -> ExtraBlock:
        """Copies. tensors: as copy_into takes them. allocate: uint8 of so many bytes, of size_of()."""
        places, size = _lay_out(tensors)
        made = cls(allocate(size), places)
        for name, tensor in giving_way(tensors.items()):
            copy_into(made.block, places[name].offset, tensor)
        return made

    @staticmethod
    def size_of(tensors: Mapping[str, Tensor]) -> int:
        """Bytes that the block of these tensors has."""
        return _lay_out(tensors)[1]

    @staticmethod
    def offsets(tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Bytes from the first of them to each, where they are among a block's tensors, one behind the other."""
        return {name: place.offset for name, place in _lay_out(tensors)[0].items()}

    @property
    def num_bytes(self) -> int:
        return self.block.numel()

    def get(self, name: str) -> Tensor | None:
        """A view of the block; None where the adapter has no such tensor."""
        place = self.places.get(name)
        if place is None:
            return None
        own = self.block[place.offset : place.offset + place.num_bytes]
        return own.view(place.dtype).view(place.shape)

    def address(self, name: str) -> int:
        """On the block's device; 0 where the adapter has no such tensor."""
        place = self.places.get(name)
        return 0 if place is None else self.block.data_ptr() + place.offset

    def in_memory(self, block: Tensor) -> ExtraBlock:
        """The same tensors, where a copy of the block lies."""
        assert block.shape == self.block.shape
        return replace(self, block=block)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = place = Place(end, tuple(tensor.shape), tensor.dtype)
        end += aligned(place.num_bytes)
    return places, end
