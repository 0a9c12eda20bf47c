"""Finds and kills processes that may end at any time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def family(pid: int) -> list[psutil.Process]:
    """Returns all descendants of pid, or none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> list[str]:
    """Returns the command line or title, or an empty list if the process has ended."""
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Returns whether the process is running; a zombie is not, as only its exit status is left."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
