"""Which processes still run."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not: who started it has yet to ask how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
