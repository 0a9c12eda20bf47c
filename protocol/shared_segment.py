"""POSIX shared memory in which a trainer shares tensors where there is no GPU. It stands for a GPU's memory there."""

from __future__ import annotations

import mmap
import os
import re
import secrets
from pathlib import Path

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"lorafleet-[0-9a-f]{32}")


class SharedSegment:
    """A new segment of this process, which others may read until close(). Raises OSError if there is no memory."""

    def __init__(self, num_bytes: int) -> None:
        self.name = f"lorafleet-{secrets.token_hex(16)}"
        descriptor = os.open(_FOLDER / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            self.content = memoryview(mmap.mmap(descriptor, num_bytes))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    @property
    def handle(self) -> bytes:
        return self.name.encode()

    def close(self) -> None:
        (_FOLDER / self.name).unlink(missing_ok=True)


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
