"""Locks between the processes of a node, and between the threads of each: flock on a folder or on a lock file.

The kernel releases them when their holder dies, so that nothing stays locked after a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from lorafleet.resolvers.deadline import FetchDeadline

POLL_S = 0.05


@contextlib.contextmanager
def holding_folder(path: Path, *, shared: bool) -> Iterator[bool]:
    """Yields whether the folder could be locked at once: False if another process holds it, or if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _try_lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX) and _is_same_file(fd, path)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(path: Path, deadline: FetchDeadline) -> Iterator[None]:
    """Holds the lock file exclusively, and removes it afterwards. Raises AdapterUnavailable if the deadline comes
    first."""
    fd = _open_lock(path)
    try:
        while not (_try_lock(fd, fcntl.LOCK_EX) and _is_same_file(fd, path)):
            deadline.sleep(POLL_S)
            if not _is_same_file(fd, path):  # its last holder has removed it
                os.close(fd)
                fd = _open_lock(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    """Returns whether the path still names the opened file: a lock on a removed file excludes no other process."""
    mine = os.fstat(fd)
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
