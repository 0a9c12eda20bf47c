"""Writes that must survive a crash of the machine."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_libc = ctypes.CDLL(None)
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of <linux/fs.h>


def sync(path: Path) -> None:
    """Writes a file's bytes, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_to_sync(descriptor: int) -> None:
    """Makes the system write a file's bytes to the disk soon, without waiting, so that a later sync() takes less time.

    It does nothing where the file system cannot do that.
    """
    _libc.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)
