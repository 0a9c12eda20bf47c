"""Reads from the catalogue's log which names have changed since a replica's copies were correct.

A replica may use its copies of all other names without the directory, since every change is in the log before it is
acknowledged to anybody. The log is read after the question was asked, so an answer never misses a change that had been
acknowledged by then.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

import msgspec

from lorafleet.api.access.work_threads import CATALOGUE_LOG, in_turn
from lorafleet.cluster.catalogue.catalogue_log import changed_names
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.protocol.errors import LorafleetError, StoreError

READ_S = 2.0  # Seconds that a request waits for the store before it asks the directory.
_ID_KEY = "identity"

logger = logging.getLogger("lorafleet.cluster")


class LogPosition(msgspec.Struct, frozen=True, array_like=True):
    """A position in the log of one store."""

    store_id: str  # Distinguishes the store from an empty folder of the same name on another node; "" if unknown.
    next: int  # Number of the first change that is not known.


def read_store_id(store: Store) -> str:
    """Returns the store's id, which the first reader creates, or "" if the store cannot be written."""
    try:
        store.create(_ID_KEY, uuid.uuid4().hex.encode())
        return (store.read(_ID_KEY) or b"").decode()
    except StoreError as error:
        logger.warning("without the directory, replicas will not use their copies: %s", error)
        return ""


class LogEnd:
    """Reads the end of the log. All callers with the same position that ask during a read share the next one.
    `open_store` is called when the log is read for the first time."""

    def __init__(self, open_store: Callable[[], Store], read_s: float = READ_S) -> None:
        self._open_store = open_store
        self._read_s = read_s
        self._store: Store | None = None
        self._running: asyncio.Task[frozenset[str] | None] | None = None
        self._coming: dict[LogPosition, asyncio.Task[frozenset[str] | None]] = {}  # Reads that have not begun.

    async def changed_since(self, position: LogPosition) -> frozenset[str] | None:
        """Returns changed_names() of the position. Returns None too if the store does not answer, or is another one."""
        if not position.store_id:
            return None
        reading = self._coming.get(position)
        if reading is None:
            reading = asyncio.get_running_loop().create_task(self._read_after(self._running, position))
            self._coming[position] = reading
        try:
            return await asyncio.wait_for(asyncio.shield(reading), self._read_s)
        except TimeoutError:
            return None

    async def _read_after(
        self, running: asyncio.Task[frozenset[str] | None] | None, position: LogPosition
    ) -> frozenset[str] | None:
        if running is not None:
            await asyncio.wait([running])
        self._running = self._coming.pop(position)
        try:
            return await in_turn(CATALOGUE_LOG, self._read, position)
        except LorafleetError as error:
            logger.warning("the catalogue's log cannot be read: %s", error.message)
            return None

    def _read(self, position: LogPosition) -> frozenset[str] | None:
        if self._store is None:
            self._store = self._open_store()
        store_id = (self._store.read(_ID_KEY) or b"").decode()
        return changed_names(self._store, position.next) if store_id == position.store_id else None
