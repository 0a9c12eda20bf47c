"""The epoch of a directory process, within which versions can be compared."""

from __future__ import annotations

import asyncio
import uuid

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.directory.directory_messages import StaleEpoch


class DirectoryEpoch:
    """The identity of a directory. It is new in every process, and again once the catalogue has been loaded, so that
    all replicas join again and compare their copies."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.is_loaded = False
        self._load_ended = asyncio.Event()
        self._load_error: Exception | None = None

    async def load(self, catalogue: Catalogue) -> None:
        """Loads the catalogue and begins a new epoch. If this fails, all waiting callers receive the error, and load()
        may be repeated."""
        try:
            await catalogue.load()
        except Exception as error:
            self._load_error = error
            self._load_ended.set()
            raise
        self.id = uuid.uuid4().hex
        self.is_loaded, self._load_error = True, None
        self._load_ended.set()

    async def until_loaded(self) -> None:
        await self._load_ended.wait()
        if self._load_error is not None:
            raise self._load_error

    def check(self, epoch: str) -> None:
        """Raises StaleEpoch if the caller has joined another epoch."""
        if epoch != self.id:
            raise StaleEpoch(epoch)
