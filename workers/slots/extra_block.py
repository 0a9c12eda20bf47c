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

import torch
from torch import Tensor

from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.casting import as_words
from lorafleet.workers.adapters.expert_factors import ExpertFactors
from lorafleet.workers.adapters.parallel_reading import ForEach, in_turn

# By names. The matrices of experts are copied only when they are written into the block.
Extras = Mapping[str, Tensor | ExpertFactors]

ALIGNMENT = 256  # bytes; the GPU's allocator aligns in the same way, so that kernels may load 16 bytes at a time


def aligned(offset: int) -> int:
    """Returns the next offset at which a tensor of a block may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


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
    def of(cls, extras: Extras, allocate: Callable[[int], Tensor], for_each: ForEach = in_turn) -> ExtraBlock:
        """Copies the extras into a new block.

        Args:
            extras: Tensors that copy_into accepts, and experts' matrices.
            allocate: Returns a uint8 tensor of the given number of bytes, which is size_of(extras).
            for_each: Calls a function for each of the experts' matrices, perhaps in threads.
        """
        places, size = _lay_out(extras)
        made = cls(allocate(size), places)
        large: list[tuple[ExpertFactors, Tensor]] = []
        for name, values in yielding_gil(extras.items()):
            if isinstance(values, Tensor):
                copy_into(made.block, places[name].offset, values)
            else:
                large.append((values, made._view(places[name])))
        for_each(lambda pair: pair[0].write(pair[1]), large)
        return made

    @staticmethod
    def size_of(tensors: Extras) -> int:
        """Returns the size in bytes of a block of these tensors."""
        return _lay_out(tensors)[1]

    @staticmethod
    def offsets(tensors: Extras) -> dict[str, int]:
        """Returns each tensor's offset in bytes from the first of them, if they are adjacent tensors of a block."""
        return {name: place.offset for name, place in _lay_out(tensors)[0].items()}

    @property
    def num_bytes(self) -> int:
        return self.block.numel()

    def get(self, name: str) -> Tensor | None:
        """Returns a view of the block, or None if the adapter has no such tensor."""
        place = self.places.get(name)
        return None if place is None else self._view(place)

    def address(self, name: str) -> int:
        """Returns the tensor's address on the block's device, or 0 if the adapter has no such tensor."""
        place = self.places.get(name)
        return 0 if place is None else self.block.data_ptr() + place.offset

    def in_memory(self, block: Tensor) -> ExtraBlock:
        """Returns the same tensors in `block`, a copy of this block."""
        assert block.shape == self.block.shape
        return replace(self, block=block)

    def _view(self, place: Place) -> Tensor:
        own = self.block[place.offset : place.offset + place.num_bytes]
        return own.view(place.dtype).view(place.shape)


def _lay_out(tensors: Extras) -> tuple[dict[str, Place], int]:
    places, end = {}, 0
    for name, tensor in tensors.items():
        places[name] = place = Place(end, tuple(tensor.shape), tensor.dtype)
        end += aligned(place.num_bytes)
    return places, end
