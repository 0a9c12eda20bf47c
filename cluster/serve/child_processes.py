"""Makes sure that a command leaves no process behind, on Linux: it adopts orphaned descendants and ends them."""

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
    """Makes a descendant whose parent dies from now on a child of this process, so that it can be found."""
    if ON_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_adopted(until: Callable[[], bool]) -> None:
    """Reaps adopted children that have ended until `until()` is true, so that none stays a zombie while this process
    runs. Leaves the children that exist now to the code that started them."""
    own = _children_of(os.getpid()).keys()
    while not until():
        time.sleep(REAP_S)
        for pid, state in _children_of(os.getpid()).items():
            if state == "Z" and pid not in own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def end_descendants(patience_s: float = 2.0) -> None:
    """Sends SIGTERM to all descendants, and SIGKILL to those that are left after `patience_s` seconds."""
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
    """Reaps the dead children until the deadline, so that none stays a zombie where no other process would reap it."""
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def descendants(root: int) -> list[int]:
    """Returns the ids of all living descendants, from /proc."""
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
    """Returns the state of each child, by process id."""
    return {pid: state for pid, its_parent, state in _all_processes() if its_parent == parent}


def _all_processes() -> Iterator[tuple[int, int, str]]:
    """Yields (process id, parent's id, state) of each process."""
    for path in Path("/proc").glob("[0-9]*/stat") if ON_LINUX else ():
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            yield int(path.parent.name), int(parent), state
