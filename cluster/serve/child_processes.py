"""Sees to it that a command leaves no process behind, on Linux: adopts orphaned descendants, and ends them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
ON_LINUX = sys.platform == "linux"
REAP_S = 1.0


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes this process's child, and so can be found."""
    if ON_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_adopted(until: Callable[[], bool]) -> None:
    """Collects adopted children that have ended, so that they are no zombies while this process runs. The children that
    it has now are left to whoever in this process started them."""
    own = _children_of(os.getpid()).keys()
    while not until():
        time.sleep(REAP_S)
        for pid, state in _children_of(os.getpid()).items():
            if state == "Z" and pid not in own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def end_descendants(patience_s: float = 2.0) -> None:
    """SIGTERM, and SIGKILL for what is still there after patience_s."""
    for signal_number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + wait_s
        signalled: set[int] = set()
        while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in set(pids) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
            signalled.update(pids)
            time.sleep(0.05)
    _reap(time.monotonic() + 1.0)


def _reap(deadline: float) -> None:
    """Collects the dead children, so that none is left as a zombie where nobody else would do it."""
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Living ones, by /proc."""
    children: dict[int, list[int]] = {}
    for pid, parent, state in _all_processes():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def _children_of(parent: int) -> dict[int, str]:
    """The state of each, by process id."""
    return {pid: state for pid, its_parent, state in _all_processes() if its_parent == parent}


def _all_processes() -> Iterator[tuple[int, int, str]]:
    """Yields (process id, parent's id, state)."""
    for path in Path("/proc").glob("[0-9]*/stat") if ON_LINUX else ():
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            yield int(path.parent.name), int(parent), state
