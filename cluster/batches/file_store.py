"""Stores the files of batches in a catalogue's kind of store: a folder or a bucket, in objects that never change.

    files/OWNER.FILE.BYTES.EXPIRES   the record of a file; it is created last, so a file is whole or absent
    file-data/FILE.NUMBER            the file's bytes, in pieces of PIECE_BYTES

The calls block. Callers run them in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

import msgspec

from lorafleet.cluster.batches.batch_records import FileRecord, id_time_s
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.protocol.errors import StoreError

PIECE_BYTES = 8 << 20
ABANDONED_S = 7200.0  # Age at which pieces without a record count as left behind; an upload takes less.
_READERS = 16  # Records read at a time.


@dataclass(frozen=True, slots=True)
class StoredName:
    """The facts about a file that the name of its record has."""

    key: str
    owner: str
    file_id: str
    num_bytes: int
    expires_s: int

    @classmethod
    def of_key(cls, key: str) -> StoredName:
        owner, file_id, num_bytes, expires_s = key.removeprefix("files/").split(".")
        return cls(key, owner, file_id, int(num_bytes), int(expires_s))


class BatchFiles:
    """The files of all tenants. A file that has expired is absent at once, and is deleted by care().

    Args:
        clock: Seconds since 1970, the same on all nodes.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    def names(self, owner: str = "") -> list[StoredName]:
        """Returns the names of an owner's files, or of all files, the oldest first."""
        now = self._clock()
        found = [StoredName.of_key(key) for key in self._store.keys(f"files/{owner}." if owner else "files/")]
        return sorted((name for name in found if name.expires_s > now), key=lambda name: name.file_id)

    def find(self, owner: str, file_id: str, *, or_expired: bool = False) -> FileRecord | None:
        now = self._clock()
        keys = self._store.keys(f"files/{owner}.{file_id}.")
        return next((self._read(key) for key in keys if or_expired or StoredName.of_key(key).expires_s > now), None)

    def records(self, names: list[StoredName]) -> list[FileRecord]:
        """Reads the records of the names. Those that were deleted meanwhile are missing."""
        with ThreadPoolExecutor(_READERS) as readers:
            return [record for record in readers.map(lambda name: self._read(name.key), names) if record is not None]

    def add(self, record: FileRecord, content: IO[bytes]) -> None:
        """Stores a file whose content is read from its beginning. Storing the same file again changes nothing."""
        content.seek(0)
        number = 0
        while piece := content.read(PIECE_BYTES):
            self._store.create(_piece_key(record.file_id, number), piece)
            number += 1
        self._store.create(_key(record), msgspec.json.encode(record))

    def pieces(self, record: FileRecord) -> Iterator[bytes]:
        """Yields the file's bytes. Raises StoreError if the file is deleted meanwhile."""
        for number in range(_num_pieces(record.num_bytes)):
            piece = self._store.read(_piece_key(record.file_id, number))
            if piece is None:
                raise StoreError(f"the file {record.file_id} was deleted while it was read.")
            yield piece

    def delete(self, name: FileRecord | StoredName) -> None:
        """Deletes a file; first its record, without which there is no file."""
        self._store.delete(name.key if isinstance(name, StoredName) else _key(name))
        for number in range(_num_pieces(name.num_bytes)):
            self._store.delete(_piece_key(name.file_id, number))

    def care(self, in_use: Container[str]) -> None:
        """Deletes files that have expired, and pieces that an upload has left behind. No output file may be written
        meanwhile, since its pieces are older than its record. `in_use` has the ids of files that stay."""
        now = self._clock()
        names = [StoredName.of_key(key) for key in self._store.keys("files/")]
        for name in names:
            if name.expires_s <= now and name.file_id not in in_use:
                self.delete(name)
        known = {name.file_id for name in names}
        for key in self._store.keys("file-data/"):
            file_id = key.removeprefix("file-data/").partition(".")[0]
            if file_id not in known and id_time_s(file_id) < now - ABANDONED_S:
                self._store.delete(key)

    def _read(self, key: str) -> FileRecord | None:
        content = self._store.read(key)
        return None if content is None else msgspec.json.decode(content, type=FileRecord)


def _key(record: FileRecord) -> str:
    return f"files/{record.owner}.{record.file_id}.{record.num_bytes}.{record.expires_s}"


def _piece_key(file_id: str, number: int) -> str:
    return f"file-data/{file_id}.{number:06d}"


def _num_pieces(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_BYTES)
