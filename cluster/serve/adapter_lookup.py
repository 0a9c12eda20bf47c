"""Looks up the adapters that a replica may serve. This is the HTTP front's view of the directory.

A name is looked up in the replica's copies of directory entries, then in the directory, and then by the resolvers.
The engine reads and checks an adapter that a resolver finds before anyone may use it. From then on the adapter is
identified by its digest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from lorafleet.api.backend import StorageLimits
from lorafleet.cluster.admin.push_limits import limited
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.directory.directory_messages import Order
from lorafleet.cluster.directory.membership import Membership
from lorafleet.protocol.adapter_formats.sealed_memory import map_sealed
from lorafleet.protocol.admin_verbs import PushTerms, RemoveAdapter
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import AdapterExists, InvalidAdapterName, ModelNotFound, QueueFull
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, adapter_number, turn_group
from lorafleet.protocol.names import check_adapter_name, check_full_name, tenant_of
from lorafleet.resolvers.lora_resolver import LoRAResolver
from lorafleet.resolvers.store import FETCH_THREADS
from lorafleet.sandbox.job_turns import JobTurns, NoRoom, TurnLimits

NO_LIMITS = StorageLimits()
MISS_S = 2.0  # Seconds for which a failed lookup by the resolvers is cached.
MAX_MISSES = 10_000
# Lookups by resolvers, and loads from a place that a client names. Each may occupy a thread.
SEARCHES = TurnLimits(running=FETCH_THREADS, waiting=128)
# Seconds after a removal until the requests that resolved the name before it have reached the engine.
SETTLE_S = 1.0

logger = logging.getLogger("lorafleet.cluster")


class AdapterEngine(Protocol):
    """The methods of an engine that DirectoryCatalog needs. EngineClient (protocol/transport/engine_socket.py) and
    CheckingEngine have them."""

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo: ...
    async def drop_adapter(self, digest: str) -> None: ...
    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo: ...
    async def unpin_adapter(self, digest: str) -> None: ...
    async def drained(self, digest: str) -> None: ...
    async def control(self, control: EngineControl) -> None: ...


async def obey(engine: AdapterEngine, order: Order, settle_s: float = SETTLE_S) -> AdapterInfo | None:
    """Carries out an order that the directory gave to this replica. Returns the adapter's info for `load` and `pin`,
    except for a load from memory that is on another node."""
    match order.kind:
        case "load":
            if order.lora.memory is not None and map_sealed(order.lora.memory) is None:
                return None  # The memory is on another node.
            return await engine.load_adapter(order.lora)
        case "pin":
            return await engine.pin_adapter(order.lora)
        case "unpin":
            await engine.unpin_adapter(order.lora.digest)
        case "drop":
            await asyncio.sleep(settle_s)
            await engine.drained(order.lora.digest)
            await engine.drop_adapter(order.lora.digest)
        case "control":
            assert order.control is not None
            await engine.control(order.control)
    return None


class DirectoryCatalog:
    """The HTTP front's AdapterCatalog. It is never asked for the names of the base model."""

    def __init__(
        self,
        membership: Membership,
        admin: AdapterAdmin,
        engine: AdapterEngine,
        base_names: list[str],
        resolver: LoRAResolver | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._admin = admin
        self._engine = engine
        self._base_names = base_names
        self._resolver = resolver
        self._clock = clock
        self._turns = JobTurns(SEARCHES)
        self._missed_at: dict[str, float] = {}
        self._resolving: dict[str, asyncio.Task[LoRARequest]] = {}

    def set_resolver(self, resolver: LoRAResolver | None) -> None:
        """Looks up unknown names by another resolver from now on. Adapters that were found stay."""
        self._resolver = resolver
        self._missed_at.clear()

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        return await self._membership.listed(after, end, limit)

    @property
    def list_version(self) -> object | None:
        return self._membership.list_version

    async def known(self, name: str) -> LoRARequest | None:
        """Returns the adapter with this name, or None if only a resolver might know it."""
        served = await self._membership.lookup(name)
        return None if served is None else served.loras[0]

    async def resolve(self, name: str, key: str | None = None, group: str = "") -> LoRARequest:
        """Returns the adapter to use for this name.

        Args:
            key: If several versions share the name, the same key always selects the same version.
            group: The queue in which the name waits if resolvers must look for it (see turn_group).

        Raises ModelNotFound, QueueFull, and AdapterError if the adapter exists but cannot be served.
        """
        served = await self._membership.lookup(name)
        if served is not None:
            return served.draw(key)
        if self._resolver is None or self._is_missing(name):
            raise _not_found(name)
        return await self._resolve_once(self._resolver, name, group)

    async def add(
        self,
        name: str,
        path: str,
        *,
        load_inplace: bool,
        limits: StorageLimits = NO_LIMITS,
        within: str | None = None,
    ) -> LoRARequest:
        """Registers the adapter with its files, and publishes it to every replica."""
        check_full_name(name, self._base_names)
        if not load_inplace and await self.known(name) is not None:
            raise AdapterExists(
                f"The adapter {name!r} already exists; set `replace` to register a new version.", "lora_name"
            )
        # Loading rejects an unusable adapter by its header, before its files, however large, are copied into the store.
        async with self._turn(name, turn_group(tenant_of(name), None)):
            await self._engine.load_adapter(LoRARequest(name, adapter_number(name), path, within=within))
        await self._admin.push_folder(name, path, limited(PushTerms(path, load_inplace), limits), within)
        return await self.resolve(name)

    async def read_at_start(self, name: str, path: str, base_model_name: str | None) -> tuple[LoRARequest, AdapterInfo]:
        """Reads an adapter that is served from the start. No request may use it before seed()."""
        check_adapter_name(name, self._base_names)
        return await self._read(LoRARequest(name, adapter_number(name), path, base_model_name=base_model_name))

    async def seed(self, lora: LoRARequest, info: AdapterInfo) -> LoRARequest | None:
        """Publishes an adapter of read_at_start(). Returns None if the name was removed while other replicas ran: a
        restart does not bring it back."""
        return await self._admin.seed(lora, info)

    async def remove(self, name: str) -> None:
        """Removes the adapter from every replica. Its bytes are freed when its requests have ended."""
        if await self.known(name) is None:
            raise _not_found(name)
        await self._admin.administer(RemoveAdapter(name, wait_s=0))

    def _is_missing(self, name: str) -> bool:
        return self._clock() - self._missed_at.get(name, -MISS_S) < MISS_S

    async def _resolve_once(self, resolver: LoRAResolver, name: str, group: str) -> LoRARequest:
        task = self._resolving.get(name)
        if task is None:
            task = self._resolving[name] = asyncio.get_running_loop().create_task(
                self._find_in_turn(resolver, name, group)
            )
            task.add_done_callback(lambda _: self._resolving.pop(name, None))
        return await asyncio.shield(task)  # A client that disconnects must not cancel the others' wait.

    async def _find_in_turn(self, resolver: LoRAResolver, name: str, group: str) -> LoRARequest:
        async with self._turn(name, group):
            return await self._find(resolver, name)

    @asynccontextmanager
    async def _turn(self, name: str, group: str) -> AsyncIterator[None]:
        """Queues a lookup in its group. A source may take minutes for each name, so one tenant's names must leave
        room for others'. Raises QueueFull."""
        try:
            async with self._turns.turn(group):
                yield
        except NoRoom as full:
            raise QueueFull(
                f"The adapter {name!r} cannot be looked up: {full}. Try again later.",
                retry_after_s=self._turns.retry_after_s,
            ) from None

    async def _find(self, resolver: LoRAResolver, name: str) -> LoRARequest:
        try:
            check_adapter_name(name, self._base_names)
            found = await resolver.resolve_lora(self._base_names[0], name)
        except InvalidAdapterName:
            found = None
        if found is None:
            self._remember_miss(name)
            raise _not_found(name)
        lora, _ = await self._read(found)
        served = await self._membership.found(lora)
        if served is None:  # Another client unloaded it as soon as it was found.
            raise _not_found(name)
        return served.draw(None)

    def _remember_miss(self, name: str) -> None:
        if len(self._missed_at) >= MAX_MISSES:
            self._missed_at.clear()
        self._missed_at[name] = self._clock()

    async def _read(self, lora: LoRARequest) -> tuple[LoRARequest, AdapterInfo]:
        started = self._clock()
        info = await self._engine.load_adapter(lora)
        load_s = self._clock() - started
        logger.info("adapter %s: rank %d, %d bytes, read in %.3f s", lora.lora_name, info.rank, info.num_bytes, load_s)
        if info.left_out:
            logger.info(
                "adapter %s: %s is left out, since only texts are served", lora.lora_name, ", ".join(info.left_out)
            )
        return msgspec.structs.replace(lora, digest=info.digest, left_out=info.left_out), info


def _not_found(name: str) -> ModelNotFound:
    return ModelNotFound(f"The model `{name}` does not exist.", "model")
