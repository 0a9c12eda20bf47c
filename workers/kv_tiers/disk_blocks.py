"""Holds the KV blocks of the disk tier of one rank, in one file without a name.

The file ends with the process, however that ends, so no start finds blocks of other weights, formats or versions of
this code. Its bytes are checked with CRC-32 when they are read. That finds every burst of up to 32 damaged bits, and
misses other damage once in four billion times. It guards against damage, not against attackers, who could not open the
file. zlib's is in the standard library, releases the GIL, and is several times as fast as BLAKE2b.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

from lorafleet.protocol.errors import ConfigError

Write = Callable[[int, memoryview, int], int]  # as os.pwrite


class DamagedBlockError(Exception):
    """A block was not read as it was written."""


class DiskBlocks:
    """Threads may read and write different slots at the same time.

    Raises ConfigError if the folder is missing, cannot be written, or has too little room.
    """

    def __init__(
        self, folder: Path, num_slots: int, num_bytes: int, write: Write = os.pwrite, other_bytes: int = 0
    ) -> None:
        """`num_bytes` are those of a slot, and `other_bytes` those that other files in the folder will need."""
        try:
            free = shutil.disk_usage(folder).free
            self.descriptor, name = tempfile.mkstemp(dir=folder, prefix="lorafleet-kv-")
            os.unlink(name)
        except OSError as error:
            raise ConfigError(
                f"kv_disk_dir={str(folder)!r} cannot hold KV blocks: {error.strerror}. Name a folder that exists and "
                "that the worker may write.",
                "kv_disk_dir",
            ) from error
        self._close = weakref.finalize(self, os.close, self.descriptor)
        needed = num_slots * num_bytes + other_bytes
        if free < needed:
            self.close()
            raise ConfigError(
                f"kv_disk_dir={str(folder)!r} has {free / 2**30:.2f} GiB of free space, less than the "
                f"{needed / 2**30:.2f} GiB of kv_disk_gib. Lower kv_disk_gib, or name another folder.",
                "kv_disk_gib",
            )
        self.num_slots = num_slots
        self._num_bytes = num_bytes
        self._write = write
        self._sums: dict[int, int] = {}  # CRC-32 of each slot that is written

    def write(self, slot: int, source: memoryview) -> None:
        """Writes the bytes of a slot. Raises OSError, for example if the disk is full."""
        self._sums.pop(slot, None)
        done = 0
        while done < self._num_bytes:
            done += self._write(self.descriptor, source[done:], slot * self._num_bytes + done)
        self._sums[slot] = zlib.crc32(source)

    def read(self, slot: int, target: memoryview) -> None:
        """Reads the bytes of a slot. Raises OSError, and DamagedBlockError if they are not those that were written."""
        done = 0
        while done < self._num_bytes:
            count = os.preadv(self.descriptor, [target[done:]], slot * self._num_bytes + done)
            if not count:
                raise DamagedBlockError(f"slot {slot} ends after {done} of {self._num_bytes} bytes")
            done += count
        if zlib.crc32(target) != self._sums.get(slot):
            raise DamagedBlockError(f"slot {slot} has another checksum than when it was written")

    def close(self) -> None:
        self._close()
