"""Unpacks the tar of a download while it arrives. It writes only files of an adapter, by their fixed names, into one
folder: whatever the tar says, nothing can be written elsewhere, and no more than an adapter's files may have."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from lorafleet.client.client_errors import DownloadError
from lorafleet.protocol.adapter_formats.adapter_files import (
    BIN_NAME,
    CONFIG_NAME,
    MAX_BIN_BYTES,
    MAX_CONFIG_BYTES,
    MAX_WEIGHTS_BYTES,
    OPTIONAL_NAMES,
    SAFETENSORS_NAME,
)

# The files of an adapter, with their size limits.
ADAPTER_FILES: Mapping[str, int] = {
    CONFIG_NAME: MAX_CONFIG_BYTES,
    SAFETENSORS_NAME: MAX_WEIGHTS_BYTES,
    BIN_NAME: MAX_BIN_BYTES,
    **OPTIONAL_NAMES,
}
_SHOWN_CHARS = 80  # Length of a name from the tar that an error message quotes.


class Unpacker:
    """Writes the files of a tar, which comes in pieces of any size, into an existing folder.

    tarfile's own reader would read a long header of a hostile server whole into memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._header = bytearray()
        self._file: IO[bytes] | None = None
        self._missing = 0  # Bytes of the file that are still to come.
        self._padding = 0  # Bytes after the file that mean nothing.
        self._has_ended = False

    def write(self, data: bytes) -> None:
        """Takes the next bytes of the tar. Raises DownloadError, and OSError if a file cannot be written."""
        rest = memoryview(data)
        while rest and not self._has_ended:
            if self._missing:
                rest = self._write_content(rest)
            elif self._padding:
                skipped = min(self._padding, len(rest))
                self._padding -= skipped
                rest = rest[skipped:]
            else:
                rest = self._take_header(rest)

    def finish(self) -> None:
        """Raises DownloadError if the tar is not whole."""
        if not self._has_ended:
            raise DownloadError("the server's tar ended early.")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_content(self, rest: memoryview) -> memoryview:
        assert self._file is not None
        content = rest[: self._missing]
        self._file.write(content)
        self._missing -= len(content)
        if not self._missing:
            self._file.close()
        return rest[len(content) :]

    def _take_header(self, rest: memoryview) -> memoryview:
        block = rest[: tarfile.BLOCKSIZE - len(self._header)]
        self._header += block
        if len(self._header) == tarfile.BLOCKSIZE:
            header = bytes(self._header)
            self._header.clear()
            if any(header):
                self._begin_file(header)
            else:  # A block of zeros ends a tar.
                self._has_ended = True
        return rest[len(block) :]

    def _begin_file(self, header: bytes) -> None:
        try:
            entry = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise DownloadError(f"the server's tar is damaged: {error}.") from error
        name = entry.name if len(entry.name) <= _SHOWN_CHARS else f"{entry.name[:_SHOWN_CHARS]}…"
        if entry.name not in ADAPTER_FILES or not entry.isreg():
            raise DownloadError(f"the server's tar contains {name!r}, which is not a file of an adapter.")
        if not 0 <= entry.size <= ADAPTER_FILES[entry.name]:
            raise DownloadError(f"{name} has {entry.size} bytes; it may have 0 to {ADAPTER_FILES[entry.name]}.")
        try:
            (self._folder / entry.name).parent.mkdir(exist_ok=True)
            self._file = (self._folder / entry.name).open("xb")
        except FileExistsError:
            raise DownloadError(f"the server's tar contains {name} twice.") from None
        self._missing, self._padding = entry.size, -entry.size % tarfile.BLOCKSIZE
        if not entry.size:
            self._file.close()
