"""Registers adapters that were pushed. A version is loaded on some replicas before any request may use it. Then it is
written to the catalogue, and the adapter's name moves to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from lorafleet.api.access.fair_threads import be_modest
from lorafleet.api.access.work_threads import CATALOGUE_FILES, PUSHED_BYTES, in_turn, work_for
from lorafleet.cluster.admin.adapter_changes import AdapterChanges
from lorafleet.cluster.admin.engine_orders import EngineOrders
from lorafleet.cluster.admin.push_intake import ContentIntake, taking_in, working_on
from lorafleet.cluster.admin.removals import Removals
from lorafleet.cluster.admin.replica_orders import ReplicaOrders
from lorafleet.cluster.admin.storage_quota import StorageQuota
from lorafleet.cluster.catalogue.catalogue_files import stage
from lorafleet.cluster.catalogue.catalogue_records import (
    AdapterRecord,
    Share,
    VersionRecord,
    moved,
    next_number,
    taken,
    version_of_digest,
    with_version,
)
from lorafleet.cluster.catalogue.stored_files import FileLock, StoredFiles
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.task_set import TaskSet
from lorafleet.protocol.adapter_formats.sealed_memory import map_sealed
from lorafleet.protocol.admin_verbs import PreloadAdapter, PushTerms, RegisterAdapter
from lorafleet.protocol.engine_control import SupersedeAdapter
from lorafleet.protocol.errors import (
    AdapterExists,
    AdapterMissing,
    InvalidRequest,
    LorafleetError,
    OutcomeUnknown,
    Overloaded,
)
from lorafleet.protocol.lora_request import SealedAdapter, turn_group
from lorafleet.protocol.names import check_full_name, tenant_of

# Seconds after a push until the requests that resolved the name before it have reached their engines.
SETTLE_S = 1.0
PUSH_THREADS = 3  # They hash and write the content of pushes from memory.

MAX_TURNS = 3  # Attempts at one push whose name is removed meanwhile.

logger = logging.getLogger("lorafleet.cluster")


class _RemovalBegan(Exception):
    """This server has begun to remove the name of a push."""


class Registration:
    def __init__(
        self,
        directory: AdapterDirectory,
        base_names: Collection[str],
        changes: AdapterChanges,
        replicas: ReplicaOrders,
        files: StoredFiles,
        removals: Removals,
        engines: EngineOrders,
    ) -> None:
        self._directory = directory
        self._catalogue = directory.catalogue
        self._base_names = base_names
        self._changes = changes
        self._replicas = replicas
        self._files = files
        self._removals = removals
        self._engines = engines
        self._settling = TaskSet()
        self._pool = ThreadPoolExecutor(PUSH_THREADS, "push-bytes", be_modest)
        self._quota = StorageQuota(directory.catalogue)

    def _begin(self, name: str) -> None:
        """Checks the full name of an adapter that is pushed. The work on the push takes the turns of its owner."""
        check_full_name(name, self._base_names)
        work_for(turn_group(tenant_of(name), None))

    async def push_memory(self, name: str, memory: SealedAdapter, terms: PushTerms) -> AdapterRecord:
        """Pushes an adapter from memory that a trainer on this node has sealed. Raises AdapterMissing if the memory
        is on another node."""
        self._begin(name)
        content = map_sealed(memory)
        if content is None:
            raise AdapterMissing("the memory with the adapter is on another node, or is closed.")
        async with working_on(content.config, content.weights, self._catalogue.store, self._pool) as work:
            work.advance(len(content.weights))
            return await self._push_content(name, work, memory, terms)

    async def push_bytes(
        self, name: str, config: bytes, weights: npt.NDArray[np.uint8], terms: PushTerms
    ) -> AdapterRecord:
        """Pushes an adapter from another node's memory.

        Args:
            config: Content of adapter_config.json.
            weights: Content of a safetensors file.
        """
        self._begin(name)
        view = weights.data
        async with taking_in(config, len(view), self._catalogue.store, self._pool) as intake:
            await in_turn(PUSHED_BYTES, intake.add, view)
            return await self._push_content(name, intake.content, await intake.seal(), terms)

    async def _push_content(
        self, name: str, content: ContentIntake, memory: SealedAdapter, terms: PushTerms
    ) -> AdapterRecord:
        """Pushes content that is in memory: replicas load it while it is written to the store."""
        digest = await content.digest()
        await asyncio.gather(self._publish(content, digest), self.preload(PreloadAdapter(name, digest, memory, terms)))
        return await self.push(RegisterAdapter(name, digest, terms))

    async def _publish(self, content: ContentIntake, digest: str) -> None:
        await content.written()
        await in_turn(CATALOGUE_FILES, content.publish, digest)

    async def push_folder(self, name: str, path: str, terms: PushTerms) -> AdapterRecord:
        """Pushes an adapter from a folder that this process can read."""

        def put_files() -> str:
            with tempfile.TemporaryDirectory(prefix="lorafleet-push-") as folder:
                digest = stage(Path(path), Path(folder))
                self._catalogue.store.put_files(digest, Path(folder))
                return digest

        return await self._put_and_push(name, put_files, terms)

    async def _put_and_push(self, name: str, put: Callable[[], str], terms: PushTerms) -> AdapterRecord:
        """Pushes the adapter whose files `put` puts into the store; it returns their digest."""
        self._begin(name)
        return await self.push(RegisterAdapter(name, await in_turn(CATALOGUE_FILES, put), terms))

    async def push(self, pushed: RegisterAdapter) -> AdapterRecord:
        """Loads the adapter on some replicas, then registers it and moves its alias. A repeated push changes
        nothing."""
        self._begin(pushed.name)
        try:
            adapter = await self._register_in_turn(pushed)
        except OutcomeUnknown:
            raise  # The log may name the files, so they must stay.
        except LorafleetError:
            await self._removals.forget_files(pushed.digest)
            raise
        await self._supersede(adapter, pushed)
        await self._removals.prune(adapter)
        logger.info("adapter %s: %s pushed from %s", pushed.name, pushed.digest[:12], pushed.terms.source)
        return self._changes.find(pushed.name)

    async def _register_in_turn(self, pushed: RegisterAdapter) -> AdapterRecord:
        """Registers the adapter, after removals of its name that are under way. If one begins meanwhile, the push waits
        for its end and is tried again."""
        for _ in range(MAX_TURNS):
            await self._removals.wait_until_freed(pushed.name)
            with contextlib.suppress(_RemovalBegan):
                async with self._files.in_use(pushed.digest) as lock:
                    return await self._load_and_register(pushed, lock)
        raise Overloaded(
            f"adapter {pushed.name!r} was removed {MAX_TURNS} times while it was being pushed. Stop removing it, and "
            "push it again."
        )

    async def _supersede(self, adapter: AdapterRecord, pushed: RegisterAdapter) -> None:
        """Ends or switches the requests that a former version is answering, if the push says so."""
        in_flight, version = pushed.terms.in_flight, version_of_digest(adapter, pushed.digest)
        if in_flight == "finish" or version is None:
            return
        lora = self._catalogue.state.request(pushed.name, version)
        order = SupersedeAdapter(lora, aborts=in_flight == "abort")
        await self._engines.order_all(order)
        self._settling.start(self._supersede_late(order))

    async def _supersede_late(self, order: SupersedeAdapter) -> None:
        """Repeats the order for requests that found the former version before the push and reach an engine after it,
        unless the name has moved on."""
        await asyncio.sleep(SETTLE_S)
        served = self._directory.names.served(order.lora.lora_name)
        if served is None or [lora.digest for lora in served.loras] != [order.lora.digest]:
            return
        try:
            await self._engines.order_all(order)
        except LorafleetError as error:
            logger.warning("adapter %s: late requests may use its former version: %s", order.lora.lora_name, error)

    async def _load_and_register(self, pushed: RegisterAdapter, lock: FileLock) -> AdapterRecord:
        self._check_free(pushed)
        if pushed.terms.in_flight != "finish" and not pushed.terms.activate:
            raise InvalidRequest(
                f"`in_flight` is {pushed.terms.in_flight!r}, but the push does not activate the version, so that no "
                "request would use it. Set `activate`, or leave `in_flight` out.",
                "in_flight",
            )
        if not await in_turn(CATALOGUE_FILES, self._catalogue.store.has_files, pushed.digest):
            raise AdapterMissing(f"the catalogue has no files with digest {pushed.digest[:12]}…; push them first.")
        stored_bytes = await in_turn(CATALOGUE_FILES, self._catalogue.store.files_bytes, pushed.digest)
        self._quota.check_bytes(pushed.name, stored_bytes, pushed.terms)
        version = msgspec.structs.replace(await self._load(pushed), stored_bytes=stored_bytes)

        def decide(present: AdapterRecord | None) -> AdapterRecord | None:
            lock.check()
            self._check_free(pushed)
            if present is not None and present.removing:
                if self._removals.is_freeing(pushed.name):
                    raise _RemovalBegan
                raise Overloaded(f"adapter {pushed.name!r} is being removed by another server. Try again in a moment.")
            adapter = _registered(present or self._new(pushed.name), version, pushed.terms.activate)
            if adapter == present:
                return None
            self._quota.check(adapter, pushed.terms)
            return adapter

        return await self._changes.change(pushed.name, decide)

    async def _load(self, pushed: RegisterAdapter) -> VersionRecord:
        """Loads the version on the replicas that the push names, and returns its record, which has no number yet."""
        version = _new_version(pushed)
        lora = self._catalogue.state.request(pushed.name, version)
        homes = await self._homes(pushed.name, pushed.terms)
        [info, *_] = await self._replicas.order_all("load", lora, homes)
        assert info is not None
        return msgspec.structs.replace(version, rank=info.rank, num_bytes=info.num_bytes, left_out=info.left_out)

    async def preload(self, pushed: PreloadAdapter) -> None:
        """Loads content in memory on those of the push's replicas that can map it. Other replicas, and those that find
        a fault in it, answer when it is registered."""
        lora = self._catalogue.state.request(pushed.name, _new_version(pushed))
        try:
            homes = await self._homes(pushed.name, pushed.terms)
            await self._replicas.order_all("load", msgspec.structs.replace(lora, memory=pushed.memory), homes)
        except LorafleetError as error:
            logger.info("adapter %s: %s is not loaded from memory: %s", pushed.name, pushed.digest[:12], error)

    async def _homes(self, name: str, terms: PushTerms) -> list[str]:
        """Returns the replicas that must load the version before its push ends."""
        # Every replica may have to switch its requests to the version at once.
        return await self._replicas.homes(name, None if terms.in_flight == "switch" else terms.num_replicas)

    def _new(self, name: str) -> AdapterRecord:
        removed = self._catalogue.state.removed(name)
        return AdapterRecord(name, tenant=tenant_of(name), seeded_by=removed.seeded_by if removed else None)

    def _check_free(self, pushed: RegisterAdapter) -> None:
        self.check_owner(pushed.name)
        if not pushed.terms.replace and self._directory.names.served(pushed.name) is not None:
            raise AdapterExists(
                f"The adapter {pushed.name!r} already exists; set `replace` to register a new version.", "name"
            )

    def check_owner(self, name: str) -> None:
        """Raises AdapterExists if the name is an alias of another adapter."""
        owner = self._catalogue.state.owner(name)
        if owner is not None and owner.name != name:
            raise taken(name, owner.name)


def _registered(adapter: AdapterRecord, version: VersionRecord, activate: bool) -> AdapterRecord:
    """Returns the adapter with the version, and with its own name moved to the version if `activate` is set or the name
    stands for nothing yet. Bytes that the adapter has already keep their number."""
    known = version_of_digest(adapter, version.digest)
    if known is None:
        known = msgspec.structs.replace(version, number=next_number(adapter))
        adapter = with_version(adapter, known)
    if activate or adapter.name not in adapter.aliases:
        return moved_unless_there(adapter, adapter.name, (Share(known.number, 1.0),))
    return adapter


def _new_version(pushed: RegisterAdapter | PreloadAdapter) -> VersionRecord:
    """Returns the record of a version that no replica has read yet, and that has no number."""
    terms = pushed.terms
    return VersionRecord(
        0,
        pushed.digest,
        terms.source,
        0,
        0,
        time.time(),
        base_model_name=terms.base_model_name,
        metadata=terms.metadata,
    )


def moved_unless_there(adapter: AdapterRecord, alias: str, shares: tuple[Share, ...]) -> AdapterRecord:
    if alias in adapter.aliases and adapter.shares(alias) == shares:
        return adapter
    return moved(adapter, alias, shares, time.time())
