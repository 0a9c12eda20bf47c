"""Processes that may end between two looks at them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def family(pid: int) -> list[psutil.Process]:
    """All below pid; none where it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> list[str]:
    """Its command line or title; nothing where it has ended."""
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return []


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not: who started it has yet to ask how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
