"""Limits that a sandboxed program sets on itself before it reads any untrusted data."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

NICENESS = 5  # A program that uses its whole limit must not slow down the engine beside it.


def confine(memory_bytes: int) -> None:
    """Allows memory_bytes beyond the process's present memory, and no files, processes or core dumps."""
    bound_memory(memory_bytes)
    os.nice(NICENESS)
    for limit, value in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(limit, (value, value))


def bound_memory(memory_bytes: int) -> None:
    """Allows memory_bytes beyond the process's present memory."""
    MemoryBound().set(memory_bytes)


class MemoryBound:
    """The memory limit of this process. It must be created before confine(), because it opens a file; set() also
    works after it."""

    def __init__(self) -> None:
        self._statm = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115  # open for as long as this lives

    def set(self, memory_bytes: int) -> None:
        """Allows memory_bytes beyond the process's present memory."""
        self._statm.seek(0)
        present_bytes = int(self._statm.read(64).split()[0]) * resource.getpagesize()
        hard_bytes = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (present_bytes + memory_bytes, hard_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def cpu_limit(cpu_s: float) -> Iterator[None]:
    """Ends the process with SIGPROF when the block has used cpu_s seconds of processor time, even within one long
    call.

    The clock counts only this process, so a busy machine does not end a harmless job.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
