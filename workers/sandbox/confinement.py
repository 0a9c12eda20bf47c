"""The limits that a sandboxed program sets on itself before it reads anything that a stranger wrote."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

NICENESS = 5  # a program that uses its whole limit must not slow the engine beside it


def confine(memory_bytes: int) -> None:
    """Allows memory_bytes beside what the process has already, and no files, processes or core dumps."""
    bound_memory(memory_bytes)
    os.nice(NICENESS)
    for limit, value in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(limit, (value, value))


def bound_memory(memory_bytes: int) -> None:
    """Allows memory_bytes beside what the process has already."""
    with open("/proc/self/statm") as file:
        present_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present_bytes + memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def cpu_limit(cpu_s: float) -> Iterator[None]:
    """Ends the process with SIGPROF when the block has used cpu_s seconds of processor time, even within one long call.

    The clock counts only this process, so that a busy machine does not end a harmless job.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
