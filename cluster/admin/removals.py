"""Removes adapters and old versions: their names at once, and their bytes once no request uses them any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from lorafleet.cluster.admin.adapter_changes import AdapterChanges
from lorafleet.cluster.admin.replica_orders import ReplicaOrders
from lorafleet.cluster.catalogue.catalogue_records import (
    AdapterRecord,
    RemovalRecord,
    VersionRecord,
    without_versions,
)
from lorafleet.cluster.catalogue.stored_files import StoredFiles
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.task_set import TaskSet
from lorafleet.protocol.admin_verbs import REMOVE_S
from lorafleet.protocol.errors import LorafleetError, Overloaded

MAX_VERSIONS = 10  # Versions per adapter; a further push drops the oldest one that no alias stands for.

logger = logging.getLogger("lorafleet.cluster")


class Removals:
    def __init__(
        self, directory: AdapterDirectory, changes: AdapterChanges, replicas: ReplicaOrders, files: StoredFiles
    ) -> None:
        self._directory = directory
        self._catalogue = directory.catalogue
        self._changes = changes
        self._replicas = replicas
        self._files = files
        self._freeing: dict[str, asyncio.Task[None]] = {}  # Removals in progress, by adapter.
        self._tasks = TaskSet()

    def resume(self) -> None:
        """Continues the removals that had begun before a restart."""
        for name in self._catalogue.state.removing:
            self._start_freeing(self._catalogue.state.adapters[name])

    async def remove(self, name: str, wait_s: float) -> None:
        """Stops serving the adapter under any name, then waits up to `wait_s` seconds until its bytes are freed
        everywhere. Raises Overloaded if requests still use it then; the removal continues by itself."""
        adapter = self._catalogue.state.adapters.get(name)
        if adapter is None and name in self._directory.names.found:
            await self._forget_found(name)
            return
        if adapter is None or not adapter.removing:
            adapter = await self._changes.edit(name, _without_names)
        freeing = self._freeing.get(name) or self._start_freeing(adapter)
        if wait_s > 0:
            done, _ = await asyncio.wait([freeing], timeout=wait_s)
            if not done:
                raise Overloaded(
                    f"adapter {name!r} is no longer served, but after {wait_s:.0f} s requests for it are still "
                    "running. It is freed when they end; check with `show` whether it is gone."
                )
            freeing.result()

    async def unlist(self, name: str) -> None:
        """Removes an adapter that is no longer listed in lora_modules, without waiting. It may be listed again."""
        unmarked = await self._changes.edit(
            name, lambda present: msgspec.structs.replace(_without_names(present), seeded_by=None)
        )
        self._start_freeing(unmarked)

    async def wait_until_freed(self, name: str) -> None:
        """Waits until a removal of the name has ended, if there is one. Raises Overloaded after REMOVE_S seconds."""
        while (freeing := self._freeing.get(name)) is not None:
            await asyncio.wait([freeing], timeout=REMOVE_S)
            if not freeing.done():
                raise Overloaded(f"adapter {name!r} is being removed: requests for it are still running. Try again.")

    async def prune(self, adapter: AdapterRecord) -> None:
        """Drops the oldest versions above MAX_VERSIONS that no alias stands for."""
        excess, served = len(adapter.versions) - MAX_VERSIONS, adapter.served()
        unserved = [version for version in adapter.versions if version.number not in served]
        dropped = unserved[: max(excess, 0)]
        if dropped:
            numbers = {version.number for version in dropped}
            await self._changes.edit(adapter.name, lambda present: without_versions(present, numbers))
            self._tasks.start(self._free(adapter.name, dropped))

    async def forget_files(self, digest: str) -> None:
        """Deletes the files of a push that changed nothing. If that fails, they are collected later."""
        try:
            await self._files.delete_unless_named(digest)
        except LorafleetError as error:
            logger.warning("the files of %s could not be deleted; they are collected later: %s", digest[:12], error)

    def follow_others(self, before: list[AdapterRecord]) -> None:
        """Follows changes by another server of the same catalogue. `before` holds the adapters as they were. Versions
        that nothing names now are dropped from this server's replicas; the other server deletes the files in the
        store."""
        for adapter in before:
            for version in [] if adapter.removing else adapter.versions:
                if not self._catalogue.state.versions(version.digest):
                    self._tasks.start(self._drop_unless_used(adapter.name, version))

    async def _forget_found(self, name: str) -> None:
        """Removes a name that only resolvers know. The removal is also written to the log, for replicas that check
        their copies against it (catalogue/log_end.py)."""
        await self._catalogue.change(name, lambda present: RemovalRecord(name) if present is None else None)
        self._directory.names.forget_found(name)
        await self._directory.leases.acknowledged()

    def _start_freeing(self, adapter: AdapterRecord) -> asyncio.Task[None]:
        async def free() -> None:
            try:
                await self._directory.leases.acknowledged()
                await self._free(adapter.name, adapter.versions)
                await self._catalogue.change(adapter.name, _removal)
                logger.info("adapter %s was removed", adapter.name)
            finally:
                del self._freeing[adapter.name]

        task = asyncio.get_running_loop().create_task(free(), name=f"removal of {adapter.name}")
        self._freeing[adapter.name] = task
        return task

    async def _free(self, name: str, versions: Iterable[VersionRecord]) -> None:
        """Drops the versions from every replica once no request uses them. Also deletes their files from the store,
        unless another version has the same bytes."""
        for version in versions:
            await self._drop_unless_used(name, version)
            if not version.location and not await self._files.delete_unless_named(version.digest, removed=name):
                logger.info("adapter %s: the files of %s are kept, as they are in use", name, version.digest[:12])

    async def _drop_unless_used(self, name: str, version: VersionRecord) -> None:
        if not self._catalogue.state.versions(version.digest):
            await self._replicas.drop_everywhere(self._catalogue.state.request(name, version))


def _without_names(adapter: AdapterRecord) -> AdapterRecord:
    return msgspec.structs.replace(adapter, aliases={}, removing=True, pinned_replicas=0)


def _removal(present: AdapterRecord | None) -> RemovalRecord | None:
    """Returns the entry that removes the adapter, or None if another server of the same catalogue was first."""
    return RemovalRecord(present.name, present.seeded_by) if present is not None and present.removing else None
