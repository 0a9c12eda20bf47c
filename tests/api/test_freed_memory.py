"""What large requests have used goes back to the system."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import psutil
import pytest

from lorafleet.api.freed_memory import FreedMemory, Glibc


@dataclass
class Arena:
    free: int = 0
    num_trims: int = 0

    def free_bytes(self) -> int:
        return self.free

    def trim(self) -> None:
        self.num_trims += 1


def test_memory_is_returned_once_after_enough_was_freed() -> None:
    arena = Arena(free=50)
    memory = FreedMemory(arena, freed_bytes=100)
    for free, trims in ((149, 0), (150, 1), (150, 1), (10, 1), (109, 1), (110, 2)):
        arena.free = free
        memory.look()
        assert arena.num_trims == trims, free


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc")
def test_holes_between_what_is_still_used_are_returned() -> None:
    memory, process = FreedMemory(Glibc()), psutil.Process()
    blocks = [bytes(20_000) for _ in range(5000)]
    full = process.memory_info().rss
    blocks = blocks[::20]  # What stays keeps the arena from shrinking at its end.
    assert memory.look()
    assert full - process.memory_info().rss > 50_000_000
    assert len(blocks) == 250
    assert not memory.look()
