"""The operations of administrators on adapters: push, alias, rollback, pin, prefetch, remove, verify.

When a call returns, its change is durable and known to every replica. A call that fails says which replica failed and
why, and leaves the catalogue as it was. This code runs in the directory's process; HTTP, command line and actor
handle all call it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_files import stage, stage_tensors
from lorafleet.cluster.catalogue.catalogue_records import (
    AdapterRecord,
    RemovalRecord,
    Share,
    VersionRecord,
    moved,
    next_number,
    num_bytes_of,
    rolled_back,
    taken,
    with_version,
    without_alias,
    without_versions,
)
from lorafleet.cluster.catalogue.stored_files import FileLock, StoredFiles
from lorafleet.cluster.directory.directory import AdapterDirectory, OrderKind
from lorafleet.cluster.directory.slices import in_slices
from lorafleet.cluster.directory.task_leases import TaskLeases
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of
from lorafleet.cluster.task_set import TaskSet
from lorafleet.protocol.adapter_files import folder_digest
from lorafleet.protocol.errors import (
    AdapterChanged,
    AdapterExists,
    AdapterMissing,
    InvalidRequest,
    LorafleetError,
    ModelNotFound,
    OutcomeUnknown,
    Overloaded,
    QuotaExceeded,
)
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, turn_group
from lorafleet.protocol.names import PAST_ALL, check_full_name, full_name, past_names_of, tenant_of
from lorafleet.resolvers.source import is_uri
from lorafleet.sandbox.job_turns import TurnLimits

MAX_VERSIONS = 10  # Versions per adapter; a further push drops the oldest one that no alias stands for.
ORDER_S = 300.0  # Seconds that a replica may take to load an adapter.
REMOVE_S = 60.0  # Seconds that `remove` waits for in-flight requests before it continues without the caller.
MAX_ADAPTERS_LISTED = 1000
# Versions whose files are read again: `running` limits those at a time, `waiting` those of one tenant.
VERIFICATIONS = TurnLimits(running=2, waiting=16)

logger = logging.getLogger("lorafleet.cluster")


class Pushed(msgspec.Struct, frozen=True):
    """A push of an adapter whose files are already in the store, and how the adapter is to be served."""

    name: str  # Full name, which includes the tenant that owns the adapter.
    digest: str  # Digest of the files in the store.
    source: str
    replace: bool = True  # Gives an existing name a new version; if False, an existing name raises AdapterExists.
    activate: bool = True  # Moves the name's alias to the new version.
    num_replicas: int = 1  # Number of replicas that must load the version before the call returns.
    base_model_name: str | None = None
    metadata: dict[str, str] = {}
    max_adapters: int | None = None  # Number of adapters that the owning tenant may have; None: no limit.
    max_bytes: int | None = None  # Bytes of adapters that the owning tenant may have; None: no limit.


class Administration:
    def __init__(self, directory: AdapterDirectory, base_names: Collection[str]) -> None:
        self._directory = directory
        self._base_names = base_names
        self._pins: dict[tuple[str, str], LoRARequest] = {}  # Ordered pins, by replica and digest.
        self._freeing: dict[str, asyncio.Task[None]] = {}  # Removals in progress, by adapter.
        self._tasks = TaskSet()
        self._files = StoredFiles(directory.catalogue)
        self._turns = TaskLeases()
        self._verifications = FairThreads("verifications", VERIFICATIONS)
        directory.on_replicas = self._repin
        directory.pins = self._pinned_at
        directory.catalogue.on_others = self._follow_others

    @property
    def _catalogue(self) -> Catalogue:
        return self._directory.catalogue

    def resume(self) -> None:
        """Continues the removals that had begun before a restart."""
        for name in self._catalogue.state.removing:
            self._start_freeing(self._catalogue.state.adapters[name])

    # -- reading --------------------------------------------------------------------------------------------------

    async def list_adapters(self, after: str = "", limit: int = 100, tenant: str | None = None) -> list[AdapterRecord]:
        """Returns the first adapters behind the name `after`, in the order of their names. If a tenant is given,
        returns only the adapters that it owns. Raises InvalidRequest if the limit is out of range."""
        if not 1 <= limit <= MAX_ADAPTERS_LISTED:
            raise InvalidRequest(
                f"limit is {limit}; it must be 1 to {MAX_ADAPTERS_LISTED}. Ask for more with `after`.", "limit"
            )
        found: list[AdapterRecord] = []
        await in_slices(self._list(after, limit, tenant, found))
        return found

    def _list(self, after: str, limit: int, tenant: str | None, found: list[AdapterRecord]) -> Iterator[None]:
        """Appends the adapters to `found`, in short steps. An adapter that is being removed no longer belongs to its
        tenant."""
        end = PAST_ALL if tenant is None else past_names_of(tenant)
        position = after if tenant is None else max(after, full_name(tenant, ""))
        while len(found) < limit and (names := self._catalogue.state.adapter_names.between(position, end, limit)):
            for name in names[: limit - len(found)]:
                position = name
                adapter = self._catalogue.state.adapters.get(name)
                if adapter is not None and (tenant is None or not adapter.removing):
                    found.append(adapter)
                yield

    async def show(self, name: str) -> AdapterRecord:
        return self._adapter(name)

    async def verify(self, name: str) -> list[VersionRecord]:
        """Reads the files of every version again. Raises AdapterChanged for a version whose bytes differ from those
        that were registered, and InvalidRequest for a version at a URI, of which the catalogue has no files."""
        adapter = self._adapter(name)
        for version in adapter.versions:
            if is_uri(version.location):
                raise InvalidRequest(
                    f"version {version.number} of adapter {name!r} lies at {version.location}, not in the catalogue: "
                    "replicas check its digest whenever they fetch it. Push it to have a copy that can be verified."
                )
            group = turn_group(tenant_of(name), None)
            digest = await self._verifications.run(group, functools.partial(self._read_again, version))
            if digest != version.digest:
                raise AdapterChanged(
                    f"version {version.number} of adapter {name!r} was registered with digest {version.digest[:12]}…, "
                    f"and its files now have {digest[:12]}…. Push it again, and roll back until then."
                )
        return list(adapter.versions)

    # -- changing -------------------------------------------------------------------------------------------------

    async def push(self, pushed: Pushed) -> AdapterRecord:
        """Loads the adapter on some replicas, then registers it and moves its alias. A repeated push changes
        nothing."""
        check_full_name(pushed.name, self._base_names)
        while (freeing := self._freeing.get(pushed.name)) is not None:
            await asyncio.wait([freeing], timeout=REMOVE_S)
            if not freeing.done():
                raise Overloaded(f"adapter {pushed.name!r} is being removed: requests for it still run. Try again.")
        try:
            async with self._files.in_use(pushed.digest) as lock:
                adapter = await self._push(pushed, lock)
        except OutcomeUnknown:
            raise  # The log may name the files, so they must stay.
        except LorafleetError:
            await self._forget_unregistered(pushed.digest)
            raise
        await self._prune(adapter)
        logger.info("adapter %s: %s pushed from %s", pushed.name, pushed.digest[:12], pushed.source)
        return self._adapter(pushed.name)

    async def push_bytes(
        self, name: str, weights: bytes, config: dict[str, Any], options: dict[str, Any]
    ) -> AdapterRecord:
        """Pushes an adapter from memory.

        Args:
            weights: content of a safetensors file.
            config: content of adapter_config.json.
            options: further fields of Pushed.
        """
        return await self._stage_and_push(
            name, lambda folder: stage_tensors(weights, config, folder), {"source": "memory"} | options
        )

    async def push_folder(self, name: str, path: str, options: dict[str, Any]) -> AdapterRecord:
        """Pushes an adapter from a folder that this process can read."""
        return await self._stage_and_push(name, lambda folder: stage(Path(path), folder), {"source": path} | options)

    async def _stage_and_push(self, name: str, fill: Callable[[Path], str], options: dict[str, Any]) -> AdapterRecord:
        def put_files() -> str:
            with tempfile.TemporaryDirectory(prefix="lorafleet-push-") as folder:
                digest = fill(Path(folder))
                self._catalogue.store.put_files(digest, Path(folder))
                return digest

        check_full_name(name, self._base_names)
        return await self.push(Pushed(name, await asyncio.to_thread(put_files), **options))

    async def _push(self, pushed: Pushed, lock: FileLock) -> AdapterRecord:
        self._check_free(pushed.name, pushed.replace)
        if not await asyncio.to_thread(self._catalogue.store.has_files, pushed.digest):
            raise AdapterMissing(f"the catalogue has no files with digest {pushed.digest[:12]}…; push them first.")
        version = VersionRecord(0, pushed.digest, pushed.source, 0, 0, time.time(), metadata=pushed.metadata)
        version = msgspec.structs.replace(version, base_model_name=pushed.base_model_name)
        lora = self._catalogue.state.request(pushed.name, version)
        [info, *_] = await self._order_all("load", lora, await self._homes(pushed.name, pushed.num_replicas))
        assert info is not None
        version = msgspec.structs.replace(version, rank=info.rank, num_bytes=info.num_bytes)

        def decide(present: AdapterRecord | None) -> AdapterRecord | None:
            lock.check()
            self._check_free(pushed.name, pushed.replace)
            if present is not None and present.removing:
                raise Overloaded(f"adapter {pushed.name!r} is being removed by another server. Try again in a moment.")
            adapter = present or self._new(pushed.name)
            known = next((one for one in adapter.versions if one.digest == pushed.digest), None)
            if known is None:
                known = msgspec.structs.replace(version, number=next_number(adapter))
                adapter = with_version(adapter, known)
            if pushed.activate or pushed.name not in adapter.aliases:
                adapter = _moved_unless_there(adapter, pushed.name, (Share(known.number, 1.0),))
            if adapter == present:
                return None
            self._check_quota(pushed, adapter)
            return adapter

        return await self._change(pushed.name, decide)

    async def seed(self, lora: LoRARequest, info: AdapterInfo, application: str) -> LoRARequest | None:
        """Registers an adapter of lora_modules that a replica has read from its own path. Known bytes add no version,
        and new ones become a new version. Returns what its name stands for, or None if it was removed since the
        application started."""

        def decide(present: AdapterRecord | None) -> AdapterRecord | None:
            owner = self._catalogue.state.owner(lora.lora_name)
            if present is None and owner is not None:
                raise taken(lora.lora_name, owner.name)
            if present is not None and (present.seeded_by == application or present.removing):
                return None
            removed = self._catalogue.state.removed(lora.lora_name)
            if removed is not None and removed.seeded_by == application:
                return None
            adapter = msgspec.structs.replace(present or AdapterRecord(lora.lora_name), seeded_by=application)
            known = next((one for one in adapter.versions if one.digest == lora.digest), None)
            version = VersionRecord(
                known.number if known else next_number(adapter),
                lora.digest,
                lora.lora_path,
                info.rank,
                info.num_bytes,
                known.created_s if known else time.time(),
                location=lora.lora_path,
                base_model_name=lora.base_model_name,
            )
            if known is not None and known.location:  # Its path may have changed.
                kept = tuple(version if one is known else one for one in adapter.versions)
                return msgspec.structs.replace(adapter, versions=kept)
            if known is not None:
                return adapter
            return moved(with_version(adapter, version), lora.lora_name, (Share(version.number, 1.0),), time.time())

        await self._catalogue.change(lora.lora_name, decide)
        served = self._catalogue.state.served(lora.lora_name, 0)
        return served.loras[0] if served is not None else None

    async def alias(self, name: str, shares: list[Share], alias: str | None = None) -> AdapterRecord:
        """Moves the alias, by default the adapter's own name, to these shares of the adapter's versions."""
        alias = alias or name
        check_full_name(alias, self._base_names)
        return await self._change(name, lambda present: self._moved(self._present(name, present), alias, tuple(shares)))

    async def unalias(self, name: str, alias: str) -> AdapterRecord:
        return await self._change(name, lambda present: without_alias(self._present(name, present), alias))

    async def rollback(self, name: str, alias: str | None = None) -> AdapterRecord:
        """Moves the alias back to what it stood for before its last move."""

        def decide(present: AdapterRecord | None) -> AdapterRecord:
            adapter = self._present(name, present)
            if (alias or name) not in adapter.aliases:
                raise ModelNotFound(f"adapter {name!r} has no alias {alias!r}.", "alias")
            return rolled_back(adapter, alias or name)

        return await self._change(name, decide)

    async def pin(self, name: str, num_replicas: int = 1) -> AdapterRecord:
        """Pins the versions behind the adapter's aliases in slots of `num_replicas` replicas. Restores the former
        number of replicas if a pin fails."""
        before = self._adapter(name).pinned_replicas
        await self._homes(name, num_replicas)
        await self._set_pinned(name, num_replicas)
        try:
            await self._pinned(name)
        except LorafleetError:
            await self._set_pinned(name, before)
            raise
        return self._adapter(name)

    async def unpin(self, name: str) -> AdapterRecord:
        self._adapter(name)
        return await self._set_pinned(name, 0)

    async def prefetch(self, name: str, num_replicas: int = 1) -> list[str]:
        """Loads the versions behind the adapter's aliases on `num_replicas` replicas, and returns these replicas."""
        adapter = self._adapter(name)
        holders: list[str] = []
        for number in sorted(adapter.served()):
            lora = self._catalogue.state.request(name, adapter.version(number))
            holders = await self._homes(name, num_replicas)
            await self._order_all("load", lora, holders)
        return holders

    async def remove(self, name: str, wait_s: float = REMOVE_S) -> None:
        """Stops serving the adapter under any name, then waits up to `wait_s` seconds until its bytes are freed
        everywhere. Raises Overloaded if requests still use it then; the removal continues by itself."""
        adapter = self._catalogue.state.adapters.get(name)
        if adapter is None and name in self._directory.resolved:
            await self._forget_found(name)
            return
        if adapter is None or not adapter.removing:
            self._adapter(name)
            adapter = await self._change(
                name,
                lambda present: msgspec.structs.replace(
                    self._present(name, present), aliases={}, removing=True, pinned_replicas=0
                ),
            )
        freeing = self._freeing.get(name) or self._start_freeing(adapter)
        if wait_s > 0:
            done, _ = await asyncio.wait([freeing], timeout=wait_s)
            if not done:
                raise Overloaded(
                    f"adapter {name!r} is not served any more, but after {wait_s:.0f} s requests for it still run. It "
                    "is freed when they end; `show` says when it is gone."
                )
            freeing.result()

    async def _forget_found(self, name: str) -> None:
        """Removes a name that only resolvers know. The removal is also written to the log, for replicas that check
        their copies against it (catalogue/log_end.py)."""
        await self._catalogue.change(name, lambda present: RemovalRecord(name) if present is None else None)
        self._directory.forget_found(name)
        await self._directory.acknowledged()

    async def take_turn(self, task: str, replica_id: str, for_s: float) -> bool:
        """Returns whether the replica holds the lease for the task; see task_leases.py."""
        return self._turns.take(task, replica_id, for_s)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _adapter(self, name: str) -> AdapterRecord:
        adapter = self._catalogue.state.adapters.get(name)
        if adapter is None:
            raise ModelNotFound(f"There is no adapter `{name}` in the catalogue.", "name")
        return adapter

    def _present(self, name: str, adapter: AdapterRecord | None) -> AdapterRecord:
        if adapter is None or adapter.removing:
            raise ModelNotFound(f"There is no adapter `{name}` in the catalogue.", "name")
        return adapter

    def _new(self, name: str) -> AdapterRecord:
        removed = self._catalogue.state.removed(name)
        return AdapterRecord(name, tenant=tenant_of(name), seeded_by=removed.seeded_by if removed else None)

    def _check_free(self, name: str, replace: bool) -> None:
        owner = self._catalogue.state.owner(name)
        if owner is not None and owner.name != name:
            raise taken(name, owner.name)
        if not replace and self._directory.served(name) is not None:
            raise AdapterExists(f"There is an adapter {name!r} already; allow `replace` for a new version.", "name")

    def _check_quota(self, pushed: Pushed, adapter: AdapterRecord) -> None:
        """Raises QuotaExceeded if the owning tenant would exceed its limits with the adapter as given."""
        tenant = tenant_of(pushed.name)
        if tenant is None:
            return
        others = {name: size for name, size in self._catalogue.state.owned(tenant).items() if name != pushed.name}
        num_bytes = sum(others.values()) + num_bytes_of(adapter)
        if pushed.max_adapters is not None and len(others) + 1 > pushed.max_adapters:
            raise QuotaExceeded(
                f"Tenant {tenant!r} would have {len(others) + 1} adapters; its limit is {pushed.max_adapters}. Remove "
                "one, or ask the operator for a higher `adapters`.",
                "name",
            )
        if pushed.max_bytes is not None and num_bytes > pushed.max_bytes:
            raise QuotaExceeded(
                f"Tenant {tenant!r} would have {num_bytes} bytes of adapters; its limit is {pushed.max_bytes}. Remove "
                "adapters that are not needed, or ask the operator for a higher `adapter_bytes`.",
                "name",
            )

    def _moved(self, adapter: AdapterRecord, alias: str, shares: tuple[Share, ...]) -> AdapterRecord | None:
        owner = self._catalogue.state.owner(alias)
        if owner is not None and owner.name != adapter.name:
            raise taken(alias, owner.name)
        if alias != adapter.name and alias in self._catalogue.state.adapters:
            raise taken(alias, alias)
        there = _moved_unless_there(adapter, alias, shares)
        return None if there == adapter else there

    async def _change(self, name: str, decide: Callable[[AdapterRecord | None], AdapterRecord | None]) -> AdapterRecord:
        adapter = await self._catalogue.change(name, decide)
        assert adapter is not None, "only removal takes it away"
        self._repin()
        await self._directory.acknowledged()
        return adapter

    async def _set_pinned(self, name: str, num_replicas: int) -> AdapterRecord:
        return await self._change(
            name,
            lambda present: msgspec.structs.replace(self._present(name, present), pinned_replicas=num_replicas),
        )

    def _read_again(self, version: VersionRecord) -> str:
        if version.location:
            return folder_digest(Path(version.location))
        with tempfile.TemporaryDirectory(prefix="lorafleet-verify-") as folder:
            self._catalogue.store.fetch_files(version.digest, Path(folder))
            return folder_digest(Path(folder))

    async def _prune(self, adapter: AdapterRecord) -> None:
        """Drops the oldest versions above MAX_VERSIONS that no alias stands for."""
        excess = len(adapter.versions) - MAX_VERSIONS
        served = adapter.served()
        numbers = {one.number for one in [v for v in adapter.versions if v.number not in served][: max(excess, 0)]}
        if not numbers:
            return
        gone = [adapter.version(number) for number in numbers]
        await self._change(
            adapter.name, lambda present: without_versions(self._present(adapter.name, present), numbers)
        )
        self._tasks.start(self._free(adapter.name, gone))

    # -- on replicas ----------------------------------------------------------------------------------------------

    async def _homes(self, key: str, count: int) -> list[str]:
        live = await self._directory.wait_for_ready(count)
        if not 1 <= count <= len(live):
            raise InvalidRequest(
                f"replicas is {count}; this cluster has {len(live)} now. Ask for 1 to {len(live)}, or add replicas.",
                "replicas",
            )
        return _ring(live).first(key_of(key), count)

    async def _order_all(
        self, kind: OrderKind, lora: LoRARequest, replicas: Iterable[str], patience_s: float = ORDER_S
    ) -> list[AdapterInfo | None]:
        """Sends the order to the replicas and returns their answers. Raises the first error, with its replica's id, and
        Overloaded if a replica does not answer within `patience_s` seconds."""
        asked = {replica: self._directory.order(replica, kind, lora) for replica in replicas}
        await asyncio.wait(asked.values(), timeout=patience_s)
        for replica, answer in asked.items():
            if not answer.done():
                raise Overloaded(f"replica {replica} did not {kind} adapter {lora.lora_name!r} in {patience_s:.0f} s.")
            error = answer.exception()
            if isinstance(error, LorafleetError):
                raise type(error)(f"replica {replica}: {error.message}", error.param)
        return [answer.result() for answer in asked.values()]

    def _wanted_pins(self) -> dict[tuple[str, str], LoRARequest]:
        state, ring = self._catalogue.state, _ring(self._directory.ready())
        wanted: dict[tuple[str, str], LoRARequest] = {}
        for name in state.pinned:
            adapter = state.adapters[name]
            for number in adapter.served():
                lora = state.request(name, adapter.version(number))
                homes = ring.first(key_of(name), adapter.pinned_replicas)
                wanted |= {(replica, lora.digest): lora for replica in homes}
        return wanted

    def _repin(self) -> None:
        """Orders only the pins that changed. Called after a change, and when a replica joins or leaves."""
        wanted, live = self._wanted_pins(), set(self._directory.ready())
        for (replica, digest), lora in self._pins.items():
            if (replica, digest) not in wanted and replica in live:
                self._directory.order(replica, "unpin", lora)
        for (replica, digest), lora in wanted.items():
            if (replica, digest) not in self._pins:
                self._directory.order(replica, "pin", lora).add_done_callback(_log_failure)
        self._pins = wanted

    def _pinned_at(self) -> dict[str, tuple[str, ...]]:
        pinned: dict[str, tuple[str, ...]] = {}
        for replica, digest in self._pins:
            pinned[digest] = (*pinned.get(digest, ()), replica)
        return pinned

    async def _pinned(self, name: str) -> None:
        """Repeats the pin orders of one adapter, to wait for their outcome. Raises the first error."""
        adapter = self._adapter(name)
        for number in sorted(adapter.served()):
            lora = self._catalogue.state.request(name, adapter.version(number))
            homes = [replica for replica, digest in self._pins if digest == lora.digest]
            await self._order_all("pin", lora, homes)

    # -- removal --------------------------------------------------------------------------------------------------

    def _start_freeing(self, adapter: AdapterRecord) -> asyncio.Task[None]:
        async def free() -> None:
            try:
                await self._directory.acknowledged()
                await self._free(adapter.name, adapter.versions)
                await self._catalogue.change(adapter.name, self._gone)
                logger.info("adapter %s is removed", adapter.name)
            finally:
                del self._freeing[adapter.name]

        task = self._freeing[adapter.name] = asyncio.get_running_loop().create_task(free())
        return task

    @staticmethod
    def _gone(present: AdapterRecord | None) -> RemovalRecord | None:
        """Returns the entry that removes the adapter, or None if another server of the same catalogue was first."""
        return RemovalRecord(present.name, present.seeded_by) if present is not None and present.removing else None

    async def _free(self, name: str, versions: Iterable[VersionRecord]) -> None:
        """Drops the versions from every replica once no request uses them. Also deletes their files from the store,
        unless another version has the same bytes."""
        for version in versions:
            await self._drop_unless_used(name, version)
            if not version.location and not await self._files.delete_unless_named(version.digest, removed=name):
                logger.info("adapter %s: the files of %s stay, others name them", name, version.digest[:12])

    async def _drop_unless_used(self, name: str, version: VersionRecord) -> None:
        if not self._catalogue.state.versions(version.digest):
            await self._drop_everywhere(self._catalogue.state.request(name, version))

    async def _forget_unregistered(self, digest: str) -> None:
        """Deletes the files of a push that changed nothing. If that fails, they are collected later."""
        try:
            await self._files.delete_unless_named(digest)
        except LorafleetError as error:
            logger.warning("the files of %s stay until they are collected: %s", digest[:12], error)

    async def collect_files(self) -> None:
        """Deletes the files that no version names. Called periodically. Raises StoreError."""
        await self._files.collect()

    def _follow_others(self, before: list[AdapterRecord]) -> None:
        """Follows changes by another server of the same catalogue. `before` holds the adapters as they were. Versions
        that nothing names now are dropped from this server's replicas; the other server deletes the files in the
        store."""
        self._repin()
        for adapter in before:
            for version in [] if adapter.removing else adapter.versions:
                if not self._catalogue.state.versions(version.digest):
                    self._tasks.start(self._drop_unless_used(adapter.name, version))

    async def _drop_everywhere(self, lora: LoRARequest) -> None:
        """Drops the adapter on every live replica, and waits for as long as requests use it. A replica that leaves
        takes its copy with it."""
        asked = [self._directory.order(replica, "drop", lora) for replica in self._directory.live()]
        if asked:
            await asyncio.wait(asked)


def _moved_unless_there(adapter: AdapterRecord, alias: str, shares: tuple[Share, ...]) -> AdapterRecord:
    if alias in adapter.aliases and adapter.shares(alias) == shares:
        return adapter
    return moved(adapter, alias, shares, time.time())


def _ring(replicas: Iterable[str]) -> Rendezvous:
    """Returns a ring with equal weights, like the routers' own, so that adapters are where routers look for them
    first."""
    return Rendezvous(dict.fromkeys(replicas, 1.0))


def _log_failure(done: asyncio.Future[AdapterInfo | None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        logger.error("an adapter could not be pinned: %s", error)
