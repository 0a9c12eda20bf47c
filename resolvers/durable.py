"""What is written must outlive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """To the disk: a file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
