"""The interface of the catalogue's store: objects that are created once and never change, and adapters' files by
digest.

`create` is the only way to write, and fails if the key exists. That is all that two writers need in order not to lose
each other's updates (cluster/catalogue/catalogue_log.py). A folder and S3 can both do it; see folder_store.py and
s3_store.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lorafleet.protocol.errors import ConfigError


class FilesDraft(Protocol):
    """An adapter's files that are being written. Nobody sees them before they are published."""

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Appends to a file. Views must stay as they are until discard(). Raises StoreError."""
        ...

    def publish(self, digest: str) -> None:
        """Makes the files durable under their digest. Afterwards either all of them are there, or none."""
        ...

    def discard(self) -> None:
        """Deletes what was not published. Call it in any case."""
        ...


class Store(Protocol):
    """A store with blocking calls, which callers run in threads. Calls raise StoreError if the store does not answer,
    and its subclass StoreRefused if the requested operation has certainly not been done."""

    @property
    def uri(self) -> str: ...

    def create(self, key: str, content: bytes) -> bool:
        """Creates an object that is whole and durable once True is returned. Returns False if the key exists.

        After any StoreError other than StoreRefused, the object may have been written.
        """
        ...

    def read(self, key: str) -> bytes | None:
        """Returns the object's content, or None if there is no such key."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Returns the sorted keys with the prefix, including every key that existed when the call began."""
        ...

    def delete(self, key: str) -> None:
        """Deletes the object of a key. Does nothing if there is no such key."""
        ...

    def put_files(self, digest: str, folder: Path) -> None:
        """Copies an adapter's files into the store. Afterwards either all of them are there, or none."""
        ...

    def draft(self) -> FilesDraft:
        """Begins to write an adapter's files from memory, before their digest is known."""
        ...

    def files_uri(self, digest: str) -> str:
        """Returns a local folder's path, or an s3:// prefix."""
        ...

    def has_files(self, digest: str) -> bool:
        """Returns whether all files of the digest are there."""
        ...

    def files_bytes(self, digest: str) -> int:
        """Returns the bytes of all files of the digest; 0 if there are none."""
        ...

    def stored_digests(self) -> list[str]:
        """Returns the digests that have files, whether complete or not."""
        ...

    def fetch_files(self, digest: str, folder: Path) -> None:
        """Copies an adapter's files into an existing folder. Raises AdapterMissing if there are none."""
        ...

    def delete_files(self, digest: str) -> None: ...


def open_store(uri: str, setting: str = "catalog_uri") -> Store:
    """Opens the store of a URI. Raises ConfigError for a URI of another kind, or a folder that cannot be written.
    `setting` is the option that has the URI, for these errors."""
    if uri.startswith("s3://"):
        from lorafleet.cluster.catalogue.s3_store import S3Store  # boto3 takes half a second to import.

        return S3Store(uri, setting=setting)
    if "://" in uri:
        raise ConfigError(f"{setting}={uri!r} is neither a folder nor s3://bucket/prefix. Give one of the two.")
    from lorafleet.cluster.catalogue.folder_store import FolderStore

    return FolderStore(Path(uri), setting)
