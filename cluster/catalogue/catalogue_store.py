"""Where the catalogue is kept: objects that are created once and never changed, and the adapters' files by digest.

`create` is the only way to write, and fails where the key is taken: that is all that two writers need in order not to
lose each other's updates (cluster/catalogue/catalogue_log.py). A folder and S3 can both do it, see folder_store.py,
s3_store.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lorafleet.protocol.errors import ConfigError


class Store(Protocol):
    """Blocking; called in threads. Raises StoreError where the store does not answer, and StoreRefused, which is one,
    where what was asked for has certainly not been done."""

    @property
    def uri(self) -> str: ...

    def create(self, key: str, content: bytes) -> bool:
        """Durable and whole once it has returned True; False where the key exists.

        After any other StoreError than StoreRefused the object may have been written.
        """
        ...

    def read(self, key: str) -> bytes | None:
        """None where there is no such key."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Sorted; every key that existed when the call began."""
        ...

    def delete(self, key: str) -> None:
        """Nothing where there is no such key."""
        ...

    def put_files(self, digest: str, folder: Path) -> None:
        """Copies an adapter's files: all of them are there afterwards, or none."""
        ...

    def files_uri(self, digest: str) -> str:
        """A local folder's path, or an s3:// prefix."""
        ...

    def has_files(self, digest: str) -> bool:
        """Whether all of them are there."""
        ...

    def stored_digests(self) -> list[str]:
        """The digests of which there are files, whole or not."""
        ...

    def fetch_files(self, digest: str, folder: Path) -> None:
        """Copies an adapter's files into a folder that exists. AdapterMissing where there are none."""
        ...

    def delete_files(self, digest: str) -> None: ...


def open_store(uri: str) -> Store:
    """Raises ConfigError for a URI of another kind, or a folder that cannot be written."""
    if uri.startswith("s3://"):
        from lorafleet.cluster.catalogue.s3_store import S3Store  # boto3 takes half a second to import

        return S3Store(uri)
    if "://" in uri:
        raise ConfigError(f"catalog_uri={uri!r} is neither a folder nor s3://bucket/prefix. Give one of the two.")
    from lorafleet.cluster.catalogue.folder_store import FolderStore

    return FolderStore(Path(uri))
