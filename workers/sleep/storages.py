"""Empties the storages of tensors, fills them again, and copies them to host memory and back.

A storage that is resized to nothing gives its memory back to torch's allocator. Its tensors, and all views of it, stay
as they are and are valid again as soon as it has its size again, at whatever address.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from lorafleet.protocol.errors import LorafleetError
from lorafleet.workers.slots.pinned_memory import PIECE_BYTES, PinnedMemory

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes


class SleepingMemory(Protocol):
    """Memory that is given back and taken again."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory while it is there."""

    def empty(self) -> None:
        """Frees the memory, and with it all values."""

    def allocate(self) -> None:
        """Takes the memory again, as far as it is not there. KV blocks and weights are zero then. Raises RuntimeError,
        such as torch.OutOfMemoryError, if there is not enough."""


class SizedStorages:
    """The storages of some tensors, each once, and their sizes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        # Files that are mapped into a CPU's memory cannot be resized, and take no memory of a GPU.
        by_address = {storage.data_ptr(): storage for storage in storages if storage.resizable()}
        self._sizes = [(storage, storage.nbytes()) for storage in by_address.values() if storage.nbytes()]

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages when they have their sizes."""
        return sum(size for _, size in self._sizes)

    def up_to(self, num_bytes: int) -> list[UntypedStorage]:
        """Returns the storages of at most this size."""
        return [storage for storage, size in self._sizes if size <= num_bytes]

    def empty(self) -> None:
        """Frees the memory, and with it all values."""
        for storage, _ in self._sizes:
            storage.resize_(0)

    def allocate(self) -> None:
        """Gives each storage its size, and zeros. Raises RuntimeError, such as torch.OutOfMemoryError, if there is not
        enough memory."""
        for storage, size in self._sizes:
            if storage.nbytes() < size:
                storage.resize_(size)
                as_bytes(storage).zero_()


class StorageCopy:
    """A copy of storages in host memory, which is page-locked where they are on a GPU, if it can be locked."""

    def __init__(self, storages: Sequence[UntypedStorage]) -> None:
        self._storages = storages
        self._starts: list[int] = []
        end = 0
        for storage in storages:
            self._starts.append(end)
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        is_on_gpu = any(storage.device.type == "cuda" for storage in storages)
        self._pinned = PinnedMemory() if is_on_gpu else None
        self._block = torch.empty(end, dtype=torch.uint8) if self._pinned is None else self._pinned.take(end)
        if self._pinned is not None:
            self._lock(self._pinned)
        for held, copied in self._pieces():
            copied.copy_(held, non_blocking=True)
        self._wait()

    def restore(self) -> None:
        """Copies everything back into the storages, which have their sizes again, and waits for it."""
        for held, copied in self._pieces():
            held.copy_(copied, non_blocking=True)
        self._wait()

    def close(self) -> None:
        """Unlocks the memory, which is freed with this object."""
        if self._pinned is not None:
            self._pinned.close()

    def _lock(self, pinned: PinnedMemory) -> None:
        self._block.zero_()  # Its pages exist then, so that locking them takes less time.
        try:
            pinned.pin(self._block)
        except LorafleetError as error:
            log.warning("the weights sleep in ordinary host memory, from which they return more slowly: %s", error)

    def _pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Returns parts of the storages, and of the block. None of them spans two pieces that are locked apart."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for storage, start in zip(self._storages, self._starts, strict=True):
            held, size = as_bytes(storage), storage.nbytes()
            copied = self._block[start : start + size]
            cuts = [0, *range(PIECE_BYTES - start % PIECE_BYTES, size, PIECE_BYTES), size]
            pairs += [(held[a:b], copied[a:b]) for a, b in pairwise(cuts)]
        return pairs

    def _wait(self) -> None:
        if self._pinned is not None:
            torch.cuda.synchronize(self._storages[0].device)


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Returns the whole storage as a tensor uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
