"""A node's adapters on its local disk, shared by all its processes. Each lies under its digest, complete or absent.

    adapters/<digest>/    config and weights; its modification time is that of the last use
    sources/<key>         a link to the adapter that a source held in one version
    drafts/<random>/      a folder being written, locked by its writer; an unlocked one is left over from a crash
    locks/                locks of sources that are being fetched, and of the cache's room

A file's room is reserved before its bytes come. An adapter that is being read is locked by its readers and never
evicted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.errors import AdapterChanged, AdapterError, AdapterTooLarge, AdapterUnavailable, ConfigError
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.durable import sync
from lorafleet.resolvers.locks import holding_folder, locked
from lorafleet.resolvers.private_files import create_file, make_folder

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CacheCounts:
    num_adapters: int
    num_bytes: int  # includes files that are being written


class AdapterCache:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.evictions = 0  # adapters that this process evicted
        self._adapters, self._sources, self._drafts, self._locks = (
            folder / name for name in ("adapters", "sources", "drafts", "locks")
        )
        try:
            for part in (self._adapters, self._sources, self._drafts, self._locks):
                make_folder(part)
        except OSError as error:
            raise ConfigError(f"the adapter cache {str(folder)!r} cannot be created: {error.strerror}.") from error

    def holds(self, digest: str) -> bool:
        return bool(_DIGEST.fullmatch(digest)) and (self._adapters / digest).is_dir()

    def digest_of(self, key: str) -> str | None:
        """Returns the digest of the adapter in this version of a source, or None if the cache does not have it."""
        try:
            digest = (self._sources / key).readlink().name
        except OSError:
            return None
        return digest if self.holds(digest) else None

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[Path | None]:
        """Yields the adapter's folder, which stays until the block ends, or None if it is not in the cache."""
        folder = self._adapters / digest
        if not self.holds(digest):
            yield None
            return
        with holding_folder(folder, shared=True) as held:
            if held:
                os.utime(folder)
            yield folder if held else None

    @contextlib.contextmanager
    def alone(self, source: str, deadline: FetchDeadline) -> Iterator[None]:
        """Holds the lock of a source, so that one process of the node at a time fetches it."""
        with locked(self._locks / _name(source), deadline):
            yield

    @contextlib.contextmanager
    def draft(self, sizes: Mapping[str, int], deadline: FetchDeadline) -> Iterator[Path]:
        """Yields a folder with files of these sizes, to be filled and published. It is gone after the block."""
        with locked(self._locks / "room", deadline):
            self._make_room(sum(sizes.values()))
            folder = Path(tempfile.mkdtemp(dir=self._drafts))
            lock = contextlib.ExitStack()
            held = lock.enter_context(holding_folder(folder, shared=False))
            assert held, "nobody else knows this folder"
            for name, size in sizes.items():
                make_folder((folder / name).parent)
                with open(create_file(folder / name), "wb") as file:
                    file.truncate(size)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.close()

    def publish(self, draft: Path, key: str | None, expected: str | None = None) -> str:
        """Makes a filled draft an adapter of the cache, durably, and returns its digest.

        `key` identifies the version of its source. Raises AdapterChanged if a digest is expected and the draft has
        another one, and AdapterError if the draft is not an adapter.
        """
        digest = folder_digest(draft)
        if expected is not None and digest != expected:
            raise AdapterChanged(f"the files have the digest {digest[:12]} in place of {expected[:12]}.")
        for file in draft.rglob("*"):
            sync(file)
        sync(draft)
        target = self._adapters / digest
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # if it exists, another source had the same bytes
                raise
        sync(self._adapters)
        if key is not None:
            link = self._drafts / uuid.uuid4().hex
            link.symlink_to(Path("..") / "adapters" / digest)
            link.rename(self._sources / key)
        return digest

    def discard_if_rotten(self, digest: str) -> bool:
        """Removes an adapter whose bytes differ from the ones that were written. Returns False if such an adapter is
        still in the cache, because it is being read."""
        with self.reading(digest) as folder:
            if folder is None or not is_rotten(folder, digest):
                return True
        return self._remove(self._adapters / digest)

    def remove(self, digest: str) -> None:
        """Removes an adapter that is no longer served.

        If it is being read, it stays until a later fetch needs room.
        """
        if self.holds(digest):
            self._remove(self._adapters / digest)

    def counts(self) -> CacheCounts:
        adapters = [_bytes_in(folder) for folder in _folders(self._adapters)]
        return CacheCounts(len(adapters), sum(adapters) + sum(_bytes_in(draft) for draft in _folders(self._drafts)))

    def _make_room(self, wanted: int) -> None:
        """Evicts adapters until `wanted` bytes fit. The caller holds the lock of the room."""
        if wanted > self.max_bytes:
            raise AdapterTooLarge(
                f"{wanted} bytes do not fit in the adapter cache of {self.max_bytes} bytes. Raise lora_cache_bytes."
            )
        for draft in _folders(self._drafts):
            with holding_folder(draft, shared=False) as abandoned:
                if abandoned:
                    shutil.rmtree(draft, ignore_errors=True)
        excess = self.counts().num_bytes + wanted - self.max_bytes
        if excess <= 0:
            return
        for folder in sorted(_folders(self._adapters), key=_last_wanted):
            num_bytes = _bytes_in(folder)
            if self._remove(folder):
                self.evictions += 1
                excess -= num_bytes
            if excess <= 0:
                break
        self._forget_sources()
        if excess > 0:
            raise AdapterUnavailable(
                f"the adapter cache has no room for {wanted} bytes, since everything in it is being read or written. "
                "Try again, or raise lora_cache_bytes."
            )

    def _remove(self, folder: Path) -> bool:
        """Removes the folder; returns False if a process is reading it."""
        with holding_folder(folder, shared=False) as held:
            if not held:
                return False
            gone = Path(tempfile.mkdtemp(dir=self._drafts))  # hides it at once, whatever happens during the removal
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
            return True

    def _forget_sources(self) -> None:
        for link in self._sources.iterdir():
            if not link.exists():
                link.unlink(missing_ok=True)


def is_rotten(folder: Path, digest: str) -> bool:
    """Returns whether the bytes in an adapter's folder differ from the ones that were written."""
    try:
        return folder_digest(folder) != digest
    except AdapterError:
        return True


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _folders(parent: Path) -> list[Path]:
    with os.scandir(parent) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _bytes_in(folder: str | Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:  # another process may be removing it
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
                if entry.is_dir(follow_symlinks=False):
                    total += _bytes_in(entry.path)
    return total


def _last_wanted(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
