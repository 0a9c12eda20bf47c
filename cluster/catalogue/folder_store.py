"""The store in a local folder, which every node must be able to reach if the cluster has several.

A new object is written aside, synced, and linked under its name. `link` fails if the name exists, in one step for all
processes and over NFS too, which rename does not. Only the server's user can read what is written, unless the folder
itself says that its group may (private_files.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lorafleet.protocol.adapter_formats.adapter_files import stored_files
from lorafleet.protocol.errors import AdapterMissing, ConfigError, StoreError, StoreRefused
from lorafleet.resolvers.durable import begin_to_sync, sync
from lorafleet.resolvers.private_files import FileModes, create_file, make_folder

ABANDONED_S = 3600.0  # Age in seconds at which an unpublished file counts as left behind by a crash.


class FolderStore:
    def __init__(self, root: Path, setting: str = "catalog_uri") -> None:
        self._root = root.expanduser().absolute()
        self._aside = self._root / "aside"
        self._files = self._root / "adapters"
        try:
            self._modes = FileModes.below(self._root)
            make_folder(self._aside, self._modes)
            self._clear_aside()
        except OSError as error:
            raise ConfigError(
                f"{setting}={str(root)!r} cannot be written: {error.strerror}. Use a writable folder, or s3://…"
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
            self._make_parent(target)
            with open(create_file(aside, self._modes), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = error.strerror or error
            raise StoreRefused(f"store {self.uri}: nothing was written: {reason}.") from error

    def _make_parent(self, target: Path) -> None:
        if not target.parent.is_dir():
            make_folder(target.parent, self._modes)
            sync(self._root)

    def read(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed(f"{key} cannot be read", self.uri, error) from error

    def keys(self, prefix: str) -> list[str]:
        folder, slash, start = prefix.rpartition("/")
        try:
            names = os.listdir(self._root / folder)
            return sorted(f"{folder}{slash}{name}" for name in names if name.startswith(start))
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
        draft = self.draft()
        try:
            for name, source in stored_files(folder).items():
                draft.copy(name, source)
            draft.publish(digest)
        finally:
            draft.discard()

    def draft(self) -> FolderDraft:
        return FolderDraft(self._aside / uuid.uuid4().hex, self._files, self.uri, self._modes)

    def files_uri(self, digest: str) -> str:
        return str(self._files / digest)

    def has_files(self, digest: str) -> bool:
        return (self._files / digest).is_dir()

    def files_bytes(self, digest: str) -> int:
        try:
            return sum(path.stat().st_size for path in stored_files(self._files / digest).values())
        except OSError as error:
            raise _failed(f"the files of adapter {digest[:12]} cannot be read", self.uri, error) from error

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


class FolderDraft:
    """An adapter's files in a folder that is moved to its place in one step.

    Args:
        aside: Where the folder is created.
        files: Where folders of published files are.
        uri: The store's, for messages.
        modes: Those of what is created.
    """

    def __init__(self, aside: Path, files: Path, uri: str, modes: FileModes) -> None:
        self._aside = aside
        self._published = files
        self._uri = uri
        self._modes = modes
        self._open: dict[str, BinaryIO] = {}
        with self._errors():
            make_folder(files, modes, parents=False)
            make_folder(aside, modes, parents=False)

    def write(self, name: str, content: bytes | memoryview) -> None:
        with self._errors():
            if name not in self._open:
                self._open[name] = open(create_file(self._aside / name, self._modes), "wb", buffering=0)  # noqa: SIM115  discard() closes it
            file, rest = self._open[name], memoryview(content)
            while len(rest):
                rest = rest[file.write(rest) :]
            begin_to_sync(file.fileno())

    def copy(self, name: str, source: Path) -> None:
        """Copies a file, whose name may begin with a folder."""
        target = self._aside / name
        with self._errors():
            make_folder(target.parent, self._modes, parents=False)
            os.close(create_file(target, self._modes))
            shutil.copyfile(source, target)  # It keeps the mode of a file that is there.
            sync(target)
            sync(target.parent)

    def publish(self, digest: str) -> None:
        with self._errors():
            for file in self._open.values():
                os.fsync(file.fileno())
            sync(self._aside)
            with contextlib.suppress(OSError):
                self._aside.rename(self._published / digest)  # Fails if another writer was first, with the same bytes.
            sync(self._published)
            if not (self._published / digest).is_dir():
                raise StoreError(f"the files of adapter {digest[:12]} could not be moved into {self._published}.")

    def discard(self) -> None:
        for file in self._open.values():
            file.close()
        shutil.rmtree(self._aside, ignore_errors=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _failed("an adapter's files cannot be written", self._uri, error) from error


def _failed(what: str, uri: str, error: OSError) -> StoreError:
    reason = error.strerror or error
    return StoreError(f"store {uri}: {what}: {reason}. Check whether it was done before you repeat it.")
