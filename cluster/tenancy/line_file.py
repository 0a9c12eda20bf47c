"""Appends lines to a file that only grows, in a folder where several processes each have files of their own.

This file owns the descriptor, its size and the change to a new file. The caller decides when to write and to sync.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from lorafleet.protocol.errors import ConfigError
from lorafleet.resolvers.durable import sync
from lorafleet.resolvers.private_files import create_file, make_folder

MAX_FILE_BYTES = 256 << 20  # A larger file is followed by another. This is about a million sequences.
SUFFIX = ".jsonl"


class LineFile:
    """A file of lines. It is not thread-safe: the caller holds a lock, or uses one thread."""

    def __init__(self, folder: Path, name: str, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Creates the first file. Raises ConfigError if no file can be made in the folder."""
        self._folder, self._name, self._max_file_bytes = folder, name, max_file_bytes
        self.size = 0
        try:
            make_folder(folder)
            self.fd: int | None = self._new()  # None: the next write begins a new file.
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}. Make it writable, or name another.") from None

    def write(self, data: bytes | memoryview) -> int:
        """Writes as many bytes as there is room for, and returns their number. Raises OSError if it can write none."""
        if self.fd is None:
            self.fd = self._new()
        num_written = os.write(self.fd, data)
        self.size += num_written
        return num_written

    def append_durably(self, lines: bytes) -> None:
        """Returns once all lines are on the disk. Raises OSError; then none of them is in the file."""
        start = 0 if self.fd is None else self.size
        try:
            self._write_all(lines)
        except OSError:
            self._cut_back(start)
            raise
        assert self.fd is not None
        try:
            os.fsync(self.fd)
        except OSError:
            # The kernel forgets which pages a failed fsync has not written, so this file cannot be trusted anymore.
            self._cut_back(start)
            self._abandon()
            raise
        if (full := self.next_if_full()) is not None:
            os.close(full)

    def next_if_full(self) -> int | None:
        """Begins a new file if this one is large. Returns the old descriptor, which the caller must close, or None."""
        if self.size <= self._max_file_bytes:
            return None
        full, self.fd = self.fd, None
        return full

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _new(self) -> int:
        self.size = 0
        self._path = self._folder / f"{self._name}-{time.time_ns()}{SUFFIX}"
        fd = create_file(self._path, flags=os.O_EXCL | os.O_WRONLY | os.O_APPEND)
        try:
            sync(self._folder)  # Without this, a power failure may lose the file's name.
        except OSError:
            os.close(fd)
            self._path.unlink()
            raise
        return fd

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.write(rest) :]

    def _cut_back(self, size: int) -> None:
        """Truncates the file to this size, so that no half-written line is left in it."""
        if self.fd is None:
            return
        try:
            os.ftruncate(self.fd, size)
            self.size = size
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        """Closes the file, so that the next write begins a new one. Removes an empty file, so that retries do not
        leave many."""
        self.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_size == 0:
                self._path.unlink()
