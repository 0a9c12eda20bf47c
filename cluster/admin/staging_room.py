"""Limits the bytes that pushes have in the temporary folder at a time, before they are written there.

An upload is there as a tar, then as files, and then as the copy that is put into the catalogue. Nobody may take more
than is free. A tenant may take half of what others leave free, so that it never fills the folder for everybody.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import BIN_NAME, CONFIG_NAME, OPTIONAL_NAMES, SAFETENSORS_NAME
from lorafleet.protocol.errors import QueueFull, StoreRefused
from lorafleet.protocol.names import tenant_of

FILE_NAMES = frozenset((CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, *OPTIONAL_NAMES))  # Files that a push may have.


def _free_bytes() -> int:
    return shutil.disk_usage(tempfile.gettempdir()).free


class StagingRoom:
    """The room of one replica. Threads may share it.

    Args:
        free_bytes: Returns the free bytes of the temporary folder.
    """

    def __init__(self, free_bytes: Callable[[], int] = _free_bytes) -> None:
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._held: Counter[str | None] = Counter()  # Bytes by tenant; None: adapters without a tenant.

    @contextmanager
    def staging(self, name: str) -> Iterator[StagedBytes]:
        """Counts bytes of a push within the block. `name` is the adapter's full name, which says the tenant."""
        staged = StagedBytes(self, tenant_of(name))
        try:
            yield staged
        finally:
            staged.remove(staged.num_bytes)

    def take(self, tenant: str | None, num_bytes: int) -> None:
        with self._lock:
            own = self._held[tenant]
            free = max(0, self._free_bytes() - (self._held.total() - own))
            most = free if tenant is None else free // 2
            if own + num_bytes <= most:
                self._held[tenant] += num_bytes
                return
        message = (
            f"The push needs {num_bytes} bytes in the server's temporary folder, besides {own} of other pushes of this "
            f"tenant; at most {most} are allowed, since {free} are free. "
        )
        if own:
            raise QueueFull(message + "Wait for one of them to end.")
        raise StoreRefused(message + "Free some space there, or set TMPDIR of the server to a larger folder.")

    def give_back(self, tenant: str | None, num_bytes: int) -> None:
        with self._lock:
            self._held[tenant] -= num_bytes
            if not self._held[tenant]:
                del self._held[tenant]


class StagedBytes:
    """The bytes of one push in the temporary folder."""

    def __init__(self, room: StagingRoom, tenant: str | None) -> None:
        self.num_bytes = 0
        self._room = room
        self._tenant = tenant

    def add(self, num_bytes: int) -> None:
        """Counts bytes that are about to be written. Raises QueueFull, or StoreRefused if waiting does not help."""
        self._room.take(self._tenant, num_bytes)
        self.num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        self._room.give_back(self._tenant, num_bytes)
        self.num_bytes -= num_bytes


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of those files in a folder that a push would read."""
    sizes = 0
    for name in FILE_NAMES:
        try:
            sizes += os.stat(folder / name).st_size
        except OSError:  # Most are missing; what is wrong with the others is said when they are read.
            continue
    return sizes
