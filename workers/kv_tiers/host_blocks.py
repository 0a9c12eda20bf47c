"""Holds the KV blocks of the host tier of one rank, in page-locked memory if the rank has a GPU.

All memory is allocated and locked at the start, since the driver launches no kernel while memory is being locked.
"""

# S slots · B bytes of a slot

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lorafleet.protocol.errors import ConfigError

PAGE_BYTES = 4096
PIECE_BYTES = 256 << 20  # memory that is locked at once, in whole slots, since a copy must not span two pieces


def slot_bytes(row_bytes: int) -> int:
    """Returns the bytes of a slot for rows of so many bytes: whole pages, so that pieces are."""
    return -(-row_bytes // PAGE_BYTES) * PAGE_BYTES


class HostBlocks:
    """Raises ConfigError if the memory is not there, or cannot be locked."""

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        """`num_bytes` are those of a slot, see slot_bytes()."""
        try:
            memory = torch.empty(num_slots * num_bytes + PAGE_BYTES, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(_refusal(num_slots * num_bytes, "allocated"), "kv_host_gib") from error
        start = -memory.data_ptr() % PAGE_BYTES
        self._slots_SB = memory[start : start + num_slots * num_bytes].view(num_slots, num_bytes)
        self._locked: list[int] = []  # addresses of the locked pieces
        # Memory must not be freed while it is locked: what is allocated there later would pass for pinned memory.
        weakref.finalize(self, _unlock, self._locked).atexit = False
        if device.type == "cuda":
            self._lock(max(1, PIECE_BYTES // num_bytes))

    @property
    def num_slots(self) -> int:
        return self._slots_SB.shape[0]

    @property
    def slot_bytes(self) -> int:
        return self._slots_SB.shape[1]

    def slot(self, index: int) -> Tensor:
        """Returns the bytes of one slot, uint8 [B]."""
        return self._slots_SB[index]

    def view(self, index: int) -> memoryview:
        """Returns the bytes of one slot for reading and writing files."""
        return self._slots_SB[index].numpy().data

    def close(self) -> None:
        """Unlocks the memory, which no copy may read or write any more."""
        _unlock(self._locked)

    def _lock(self, slots_per_piece: int) -> None:
        self._slots_SB.zero_()  # locking is much faster if the pages exist
        runtime = torch.cuda.cudart()
        for piece_SB in self._slots_SB.split(slots_per_piece):
            if int(runtime.cudaHostRegister(piece_SB.data_ptr(), piece_SB.numel(), 0)):
                self.close()
                raise ConfigError(_refusal(self._slots_SB.numel(), "page-locked"), "kv_host_gib")
            self._locked.append(piece_SB.data_ptr())


def _unlock(locked: list[int]) -> None:
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop())


def _refusal(num_bytes: int, done: str) -> str:
    return (
        f"{num_bytes / 2**30:.2f} GiB of host memory for KV blocks cannot be {done}. Lower kv_host_gib, or raise the "
        "container's memory and memlock limits."
    )
