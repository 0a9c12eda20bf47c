"""Packs an adapter's files into an uncompressed tar while it is sent, so that no copy of them is made.

The files are opened and checked before the first byte is sent. They stay open, so that the adapter may be removed, or
evicted from the node's cache, while a slow client still reads it. A file that is written meanwhile is noticed by the
client, which compares the digest.
"""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    OPTIONAL_NAMES,
    AdapterFolder,
    OpenFile,
    open_weights,
    read_through,
)
from lorafleet.protocol.errors import AdapterChanged, AdapterMalformed

CHUNK_BYTES = 1 << 20  # Bytes of a download that are in memory at a time.
_END = bytes(2 * tarfile.BLOCKSIZE)


class AdapterTar:
    """The tar of an adapter's open files. One thread at a time reads it; any thread may close it."""

    def __init__(self, files: Sequence[OpenFile]) -> None:
        self.num_bytes = sum(len(_header(file)) + file.size + _padding(file) for file in files) + len(_END)
        self._files = files
        self._parts = self._pack()
        self._reading = threading.Lock()
        self._is_closed = False

    def read(self) -> bytes:
        """Returns the next bytes, at most CHUNK_BYTES, or b"" at the end. Raises AdapterMalformed if a file has
        become shorter."""
        with self._reading:
            part = b"" if self._is_closed else next(self._parts, b"")
        if self._is_closed:
            self.close()
        return part

    def close(self) -> None:
        """Closes the files, or lets the thread that is reading them close them, since a closed descriptor may soon
        belong to another file."""
        self._is_closed = True
        if self._reading.acquire(blocking=False):
            try:
                for file in self._files:
                    file.close()
            finally:
                self._reading.release()

    def _pack(self) -> Iterator[bytes]:
        for file in self._files:
            yield _header(file)
            missing = file.size
            while missing:
                chunk = file.stream.read(min(missing, CHUNK_BYTES))
                if not chunk:
                    raise AdapterMalformed(f"{file.name} is truncated.")
                missing -= len(chunk)
                yield chunk
            if _padding(file):
                yield bytes(_padding(file))
        yield _END


def open_packed(folder: Path, digest: str) -> AdapterTar:
    """Opens the files of an adapter and reads them once. Raises AdapterChanged if they do not have the digest, and
    another AdapterError if they are not an adapter's."""
    with ExitStack() as stack:
        files = [stack.enter_context(file) for file in _open_files(AdapterFolder.at(folder))]
        found = _digest(files)
        if found != digest:
            raise changed_files(digest, found)
        for file in files:
            file.check_unchanged()
            file.stream.seek(0)
        stack.pop_all()
        return AdapterTar(files)


def changed_files(digest: str, found: str) -> AdapterChanged:
    """Returns the error for files with another digest than the one that was registered."""
    return AdapterChanged(
        f"the adapter was registered with digest {digest[:12]}…, but its files now have digest {found[:12]}…. "
        "Restore its files or push it again, and then repeat the download."
    )


def _open_files(folder: AdapterFolder) -> Iterator[OpenFile]:
    """Yields the config, the optional files and, last, the weights."""
    yield folder.open(CONFIG_NAME, MAX_CONFIG_BYTES)
    for name, max_bytes in OPTIONAL_NAMES.items():
        if folder.has(name):
            yield folder.open(name, max_bytes)
    yield open_weights(folder)


def _digest(files: Sequence[OpenFile]) -> str:
    config, *optional, weights = files
    return read_through(config.stream.read(config.size), {file.name: file for file in optional}, weights)


def _header(file: OpenFile) -> bytes:
    entry = tarfile.TarInfo(file.name)
    entry.size = file.size
    return entry.tobuf(tarfile.GNU_FORMAT)  # In this format, sizes over 8 GiB fit in one header.


def _padding(file: OpenFile) -> int:
    return -file.size % tarfile.BLOCKSIZE
