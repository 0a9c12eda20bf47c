"""A replica's copy of the catalogue: kept fresh by polling the directory, and never used once it may be out of date.

Also repeats a call for which the directory turns out to have been restarted, after bringing it what this replica knows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lorafleet.cluster.directory import LEASE_S, Catalogue, Directory, Load, Progress, StaleEpoch
from lorafleet.workers.errors import LorafleetError, Overloaded
from lorafleet.workers.lora.request import LoRARequest

RETRY_S = 0.2
PATIENCE_S = 10.0  # how long a call waits for a directory that is being restarted

T = TypeVar("T")
logger = logging.getLogger("lorafleet.cluster")


class Membership:
    """`on_change(before, after)` runs on every new version, before it is acknowledged."""

    def __init__(
        self,
        directory: Directory,
        replica_id: str,
        on_change: Callable[[Catalogue, Catalogue], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.replica_id = replica_id
        self.catalogue = Catalogue("", -1, {})
        self._on_change = on_change
        self._clock = clock
        self._lease_until = 0.0
        self._following: asyncio.Task[None] | None = None

    @property
    def fresh(self) -> bool:
        """Whether the copy may be trusted: no write that it misses has been acknowledged to anybody."""
        return self._clock() < self._lease_until

    async def start(self) -> None:
        await self._call(self._join)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        if self._following:
            self._following.cancel()
        await self.directory.leave(self.replica_id)

    async def lookup(self, name: str) -> LoRARequest | None:
        """The name's entry, from the copy while it may be trusted, else from the directory."""
        entry = self.catalogue.entries.get(name)
        if entry is not None and self.fresh:
            return entry
        return await self._call(lambda: self.directory.lookup(self.catalogue.epoch, name))

    async def publish(self, entry: LoRARequest, *, replace: bool, wait: bool) -> LoRARequest:
        return await self._call(lambda: self.directory.publish(self.catalogue.epoch, entry, replace=replace, wait=wait))

    async def seed(self, entry: LoRARequest) -> LoRARequest | None:
        return await self._call(lambda: self.directory.seed(self.catalogue.epoch, entry))

    async def retract(self, name: str) -> None:
        await self._call(lambda: self.directory.retract(self.catalogue.epoch, name))

    async def report(self, load: Load) -> None:
        await self.directory.report(self.replica_id, load)

    async def note(self, text: str, *, failed: bool = False) -> None:
        logger.log(logging.ERROR if failed else logging.INFO, "replica %s: %s", self.replica_id, text)
        await self._call(lambda: self.directory.note(Progress(self.replica_id, text, failed)))

    async def _follow(self) -> None:
        while True:
            try:
                sent = self._clock()
                await self._adopt(
                    await self.directory.watch(self.replica_id, self.catalogue.epoch, self.catalogue.version), sent
                )
            except StaleEpoch:
                await self._call(self._join)
            except Exception as error:  # the directory is being restarted
                logger.warning("replica %s: the adapter directory does not answer: %r", self.replica_id, error)
                await asyncio.sleep(RETRY_S)

    async def _join(self) -> None:
        sent = self._clock()
        known = self.catalogue if self.catalogue.version >= 0 else None
        await self._adopt(await self.directory.join(self.replica_id, known), sent)

    async def _adopt(self, after: Catalogue, sent: float) -> None:
        before, self.catalogue = self.catalogue, after
        self._lease_until = sent + LEASE_S
        if (before.epoch, before.version) != (after.epoch, after.version):
            await self._on_change(before, after)

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        deadline = self._clock() + PATIENCE_S
        while True:
            try:
                return await call()
            except LorafleetError:
                raise
            except StaleEpoch:
                await self._join()
            except Exception as error:
                if self._clock() > deadline:
                    raise Overloaded(
                        f"The adapter directory did not answer for {PATIENCE_S:.0f} s; try again."
                    ) from error
                await asyncio.sleep(RETRY_S)
