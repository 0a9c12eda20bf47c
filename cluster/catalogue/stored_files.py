"""Deletes adapters' files from the store, but never files that a change in the log may name.

Several directories may share a store. A directory that is about to register or delete files creates a small object in
the store, a lock: locks/<digest>.<use or delete>.<seconds since 1970>.<unique>. It lists the locks of the others
afterwards. If a use and a deletion happen at the same time, at least one of them sees the other and stops. Before a
deletion the log is read to its end. A lock whose owner died expires after LOCK_S.

Files that nothing names stay behind if a push died, or if the outcome of its change is unknown. collect() deletes them
when they have been unnamed for ORPHAN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Literal

from lorafleet.api.access.work_threads import CATALOGUE_FILES, UPKEEP, in_turn
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.steady_clock import SteadyClock
from lorafleet.protocol.errors import OutcomeUnknown, Overloaded, StoreError

LOCK_S = 3600.0  # Age in seconds at which a lock counts as left behind; clocks of directories differ by much less.
ORPHAN_S = 3600.0  # Seconds for which files must have been unnamed before they are collected.
WAIT_S = 10.0  # Seconds that a push waits for a deletion of the same files.
WAIT_PAUSE_S = 0.1

Kind = Literal["use", "delete"]

logger = logging.getLogger("lorafleet.cluster")


class FileLock:
    """A lock on the files of one digest. `clock` returns seconds since 1970."""

    def __init__(self, key: str, clock: Callable[[], float]) -> None:
        self.key = key
        self._clock = clock
        self._since_s = clock()

    def check(self) -> None:
        """Raises Overloaded if more than half of the lock's life is over. Called right before a change that relies on
        the files."""
        age_s = self._clock() - self._since_s
        if age_s > LOCK_S / 2:
            raise Overloaded(f"the push took {age_s:.0f} s, more than {LOCK_S / 2:.0f} s. Push again.")


class StoredFiles:
    """The adapters' files in the store of a catalogue.

    Args:
        clock: Seconds since 1970. None stands for a SteadyClock, so that a clock that jumps ends nobody's locks.
    """

    def __init__(self, catalogue: Catalogue, clock: Callable[[], float] | None = None) -> None:
        self._catalogue = catalogue
        self._store = catalogue.store
        self._clock = SteadyClock() if clock is None else clock
        self._unnamed_since_s: dict[str, float] = {}  # By digest, as collect() has seen it.

    @contextlib.asynccontextmanager
    async def in_use(self, digest: str) -> AsyncIterator[FileLock]:
        """Prevents all directories from deleting the files of the digest within the block. After OutcomeUnknown the
        lock stays until it expires, since the change may be in the log. Raises Overloaded or StoreError."""
        lock = await self._lock_for_use(digest)
        try:
            yield lock
        except OutcomeUnknown:
            raise
        except BaseException:
            await self._unlock(lock)
            raise
        await self._unlock(lock)

    async def delete_unless_named(self, digest: str, removed: str | None = None) -> bool:
        """Deletes the files, and returns whether they are gone. They stay if an adapter other than `removed` names
        them, or if somebody is about to register them. Raises StoreError."""
        lock = await in_turn(CATALOGUE_FILES, self._lock, digest, "delete")
        try:
            if await in_turn(CATALOGUE_FILES, self._is_locked, digest, "use"):
                return False
            await self._catalogue.read_on()
            if self._is_named(digest, removed):
                return False
            await in_turn(CATALOGUE_FILES, self._store.delete_files, digest)
            return True
        finally:
            await self._unlock(lock)

    async def collect(self) -> None:
        """Deletes files and locks that were left behind. Called periodically. Raises StoreError."""
        await self._catalogue.read_on()
        stored = await in_turn(UPKEEP, self._store.stored_digests)
        now = self._clock()
        users = self._catalogue.state.users
        unnamed = await in_turn(UPKEEP, lambda: [digest for digest in stored if not users(digest)])
        self._unnamed_since_s = {digest: self._unnamed_since_s.get(digest, now) for digest in unnamed}
        for digest, since_s in list(self._unnamed_since_s.items()):
            if now - since_s >= ORPHAN_S and await self.delete_unless_named(digest):
                logger.info("catalogue %s: collected the unused files of %s", self._store.uri, digest[:12])
        await in_turn(UPKEEP, self._delete_expired_locks)

    def _is_named(self, digest: str, removed: str | None = None) -> bool:
        state = self._catalogue.state
        leaving = [state.adapters[name] for name in state.removing if name != removed]
        versions = [*state.versions(digest), *(version for adapter in leaving for version in adapter.versions)]
        return any(version.digest == digest and not version.location for version in versions)

    # -- locks --------------------------------------------------------------------------------------------------------

    async def _lock_for_use(self, digest: str) -> FileLock:
        deadline = time.monotonic() + WAIT_S
        while True:
            lock = await in_turn(CATALOGUE_FILES, self._lock, digest, "use")
            if not await in_turn(CATALOGUE_FILES, self._is_locked, digest, "delete"):
                return lock
            await self._unlock(lock)
            if time.monotonic() > deadline:
                raise Overloaded(f"the files of adapter {digest[:12]} are being deleted. Push again in a moment.")
            await asyncio.sleep(WAIT_PAUSE_S)

    def _lock(self, digest: str, kind: Kind) -> FileLock:
        lock = FileLock(f"locks/{digest}.{kind}.{int(self._clock())}.{uuid.uuid4().hex}", self._clock)
        self._store.create(lock.key, b"")
        return lock

    async def _unlock(self, lock: FileLock) -> None:
        try:
            await in_turn(UPKEEP, self._store.delete, lock.key)
        except StoreError as error:
            logger.warning("a lock could not be deleted; it expires after %.0f s: %s", LOCK_S, error)

    def _is_locked(self, digest: str, kind: Kind) -> bool:
        prefix = f"locks/{digest}.{kind}."
        return any(key.startswith(prefix) and not self._has_expired(key) for key in self._store.keys("locks/"))

    def _has_expired(self, key: str) -> bool:
        return self._clock() - int(key.split(".")[2]) > LOCK_S

    def _delete_expired_locks(self) -> None:
        for key in self._store.keys("locks/"):
            if self._has_expired(key):
                self._store.delete(key)
