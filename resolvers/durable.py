"""Writes that must survive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Writes a file's bytes, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
