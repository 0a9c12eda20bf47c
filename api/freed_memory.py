"""Returns memory that large requests have used to the system.

glibc keeps freed memory in arenas, up to eight for each core, and returns only what lies at an arena's end. So a front
kept most of the memory that a burst of large requests had ever needed. Here blocks of BLOCK_BYTES and more come from
the system directly, there are few arenas, and a duty returns what has become free since it last looked.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from typing import Protocol

from lorafleet.api.access.work_threads import on_duty

ARENAS = 4  # The front's threads mostly wait for each other's GIL, so few allocate at the same time.
BLOCK_BYTES = 1 << 20  # Blocks of this size are returned as soon as they are freed.
LOOK_S = 5.0
FREED_BYTES = 32 << 20  # Less than this is kept for the next requests.

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


class Allocator(Protocol):
    def free_bytes(self) -> int:
        """Returns the bytes that are free in the process's arenas, whether the system has them back or not."""
        ...

    def trim(self) -> None:
        """Returns free pages to the system. Blocks while it does."""
        ...


class _Mallinfo(ctypes.Structure):
    _fields_ = [(f"unused_{i}", ctypes.c_size_t) for i in range(8)] + [
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


class Glibc:
    """The allocator of glibc. Its calls run without the GIL."""

    def __init__(self) -> None:
        """Raises AttributeError if the process has another C library."""
        library = ctypes.CDLL(None)
        self._trim, self._info, self._option = library.malloc_trim, library.mallinfo2, library.mallopt
        self._trim.argtypes, self._trim.restype = [ctypes.c_size_t], ctypes.c_int
        self._info.argtypes, self._info.restype = [], _Mallinfo

    def set_options(self) -> None:
        self._option(_M_ARENA_MAX, ARENAS)
        self._option(_M_MMAP_THRESHOLD, BLOCK_BYTES)

    def free_bytes(self) -> int:
        return int(self._info().fordblks)

    def trim(self) -> None:
        self._trim(0)


class FreedMemory:
    """Trims an allocator when enough memory has become free since the last look."""

    def __init__(self, allocator: Allocator, freed_bytes: int = FREED_BYTES) -> None:
        self._allocator = allocator
        self._freed_bytes = freed_bytes
        self._least_free = allocator.free_bytes()  # Since the last trim. What is free beyond it was freed since then.

    def look(self) -> bool:
        """Returns whether it has trimmed. Blocks while it does."""
        free = self._allocator.free_bytes()
        self._least_free = min(self._least_free, free)
        if free - self._least_free < self._freed_bytes:
            return False
        self._allocator.trim()
        self._least_free = self._allocator.free_bytes()
        return True


async def keep_returning_memory(look_s: float = LOOK_S) -> None:
    """Returns freed memory of this process to the system. Never returns, unless the C library is not glibc."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"):
        return
    allocator = Glibc()
    allocator.set_options()
    memory = FreedMemory(allocator)
    while True:
        await asyncio.sleep(look_s)
        await on_duty(memory.look)
