"""The store in a local folder, which every node must be able to reach if the cluster has several.

A new object is written aside, synced, and linked under its name. `link` fails if the name exists, in one step for all
processes and over NFS too, which rename does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from pathlib import Path

from lorafleet.protocol.errors import AdapterMissing, ConfigError, StoreError, StoreRefused
from lorafleet.resolvers.durable import sync

ABANDONED_S = 3600.0  # Age in seconds at which an unpublished file counts as left behind by a crash.


class FolderStore:
    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()
        self._aside = self._root / "aside"
        self._files = self._root / "adapters"
        try:
            for folder in (self._aside, self._files):
                folder.mkdir(parents=True, exist_ok=True)
            self._clear_aside()
        except OSError as error:
            raise ConfigError(
                f"catalog_uri={str(root)!r} cannot be written: {error.strerror}. Use a writable folder, or s3://…"
            ) from None

    def _clear_aside(self) -> None:
        """Deletes the files that a crash has left there. Another process may be writing younger ones."""
        oldest_s = time.time() - ABANDONED_S
        for left in self._aside.iterdir():
            with contextlib.suppress(FileNotFoundError):  # Another process has just deleted or published it.
                if left.lstat().st_mtime < oldest_s:
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    @property
    def uri(self) -> str:
        return str(self._root)

    def create(self, key: str, content: bytes) -> bool:
        target, aside = self._root / key, self._aside / uuid.uuid4().hex
        try:
            self._write_aside(aside, target, content)
            try:
                os.link(aside, target)
            except FileExistsError:
                return False
            sync(target.parent)
            return True
        except OSError as error:
            raise _failed(f"{key} cannot be written", self.uri, error) from error
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    def _write_aside(self, aside: Path, target: Path, content: bytes) -> None:
        """Writes and syncs the object aside. Nobody can see it before it is linked, so an error here leaves nothing."""
        try:
            _make_folders(target.parent, self._root)
            with aside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = error.strerror or error
            raise StoreRefused(f"catalogue {self.uri}: nothing was written: {reason}.") from error

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed(f"{key} cannot be read", self.uri, error) from error

    def keys(self, prefix: str) -> list[str]:
        folder = self._root / prefix
        try:
            return sorted(f"{prefix}{name}" for name in os.listdir(folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(f"{prefix} cannot be listed", self.uri, error) from error

    def delete(self, key: str) -> None:
        try:
            (self._root / key).unlink(missing_ok=True)
        except OSError as error:
            raise _failed(f"{key} cannot be deleted", self.uri, error) from error

    def put_files(self, digest: str, folder: Path) -> None:
        if self.has_files(digest):
            return
        aside = self._aside / uuid.uuid4().hex
        try:
            aside.mkdir()
            for source in sorted(folder.iterdir()):
                _copy_durably(source, aside / source.name)
            sync(aside)
            with contextlib.suppress(OSError):
                aside.rename(self._files / digest)  # Fails if another writer was first, with the same bytes.
            sync(self._files)
            if not self.has_files(digest):
                raise StoreError(f"the files of adapter {digest[:12]} could not be moved into {self._files}.")
        except OSError as error:
            raise _failed(f"the files of adapter {digest[:12]} cannot be written", self.uri, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def files_uri(self, digest: str) -> str:
        return str(self._files / digest)

    def has_files(self, digest: str) -> bool:
        return (self._files / digest).is_dir()

    def stored_digests(self) -> list[str]:
        return [key.rpartition("/")[2] for key in self.keys("adapters/")]

    def fetch_files(self, digest: str, folder: Path) -> None:
        try:
            shutil.copytree(self._files / digest, folder, dirs_exist_ok=True)
        except FileNotFoundError:
            raise AdapterMissing(f"the catalogue has no files of adapter {digest[:12]}.") from None
        except OSError as error:
            raise _failed(f"the files of adapter {digest[:12]} cannot be read", self.uri, error) from error

    def delete_files(self, digest: str) -> None:
        """Moves the files away in one step, so that no reader finds half of them, and then deletes them."""
        aside = self._aside / uuid.uuid4().hex
        try:
            (self._files / digest).rename(aside)
            sync(self._files)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _failed(f"the files of adapter {digest[:12]} cannot be deleted", self.uri, error) from error
        shutil.rmtree(aside, ignore_errors=True)


def _make_folders(folder: Path, root: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(root)


def _copy_durably(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    sync(target)


def _failed(what: str, uri: str, error: OSError) -> StoreError:
    reason = error.strerror or error
    return StoreError(f"catalogue {uri}: {what}: {reason}. Check whether it was done before you repeat it.")
