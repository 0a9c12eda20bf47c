"""POSIX shared memory in which a trainer shares tensors where there is no GPU. It stands for a GPU's memory there.

The process that made a segment holds a lock on it, which the kernel takes away when the process ends, however it ends.
So whoever can lock a segment knows that it is abandoned.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import stat
from itertools import islice
from pathlib import Path

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"lorafleet-[0-9a-f]{32}")
_MOST_CHECKED = 1000  # Segments that one search for abandoned ones looks at.


class SharedSegment:
    """A new segment of this process, which others may read until close(), or until the process has ended and
    remove_abandoned_segments() is called. Raises OSError if there is no memory."""

    def __init__(self, num_bytes: int) -> None:
        self.name = f"lorafleet-{secrets.token_hex(16)}"
        self._descriptor = os.open(_FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # Before it has a name, so that nobody takes it for abandoned.
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self.content = memoryview(mmap.mmap(self._descriptor, num_bytes))
            # With src_dir_fd, Python calls linkat(), which follows the link to the file that has no name.
            os.link(f"/proc/self/fd/{self._descriptor}", _FOLDER / self.name, src_dir_fd=self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def handle(self) -> bytes:
        return self.name.encode()

    def close(self) -> None:
        (_FOLDER / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)


def open_segment(handle: bytes) -> memoryview:
    """Returns the content of another process's segment, read only. Raises ValueError if the handle names none of this
    user's segments."""
    name = handle.decode(errors="replace")
    if not _NAME.fullmatch(name):
        raise ValueError("the handle does not name shared memory")
    try:
        descriptor = os.open(_FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"the handle cannot be opened: {error.strerror}") from None
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise ValueError("the handle names memory of another user")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def remove_abandoned_segments() -> int:
    """Removes this user's segments whose process has ended without close(), as after SIGKILL. Returns their number."""
    with os.scandir(_FOLDER) as entries:
        names = list(islice((entry.name for entry in entries if _NAME.fullmatch(entry.name)), _MOST_CHECKED))
    return sum(map(_remove_if_abandoned, names))


def _remove_if_abandoned(name: str) -> bool:
    try:
        descriptor = os.open(_FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # It is another user's, or has just been removed.
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (_FOLDER / name).unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
