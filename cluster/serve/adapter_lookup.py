"""The adapters that a replica may answer for: the front's view of the directory.

A name is looked up in the replica's copies, then in the directory, then by the resolvers; what is found is read and
checked by the engine before anybody may use it, and its digest goes with it from then on.
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
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.catalogue.catalogue_state import adapter_number
from lorafleet.cluster.directory.directory import Order
from lorafleet.cluster.directory.membership import Membership
from lorafleet.protocol.errors import AdapterExists, InvalidAdapterName, ModelNotFound, QueueFull
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, turn_group
from lorafleet.protocol.names import check_adapter_name, check_full_name, tenant_of
from lorafleet.resolvers.lora_resolver import LoRAResolver
from lorafleet.resolvers.store import FETCH_THREADS
from lorafleet.sandbox.job_turns import NoRoom, TurnLimits, Turns

NO_LIMITS = StorageLimits()
MISS_S = 2.0  # how long it is remembered that no resolver knows a name
MAX_MISSES = 10_000
# Names that resolvers look for, or that are loaded from where a client says; each may take a thread.
SEARCHES = TurnLimits(running=FETCH_THREADS, waiting=128)
# A request that resolved its name before a removal has reached the engine this much later.
SETTLE_S = 1.0

logger = logging.getLogger("lorafleet.cluster")


class AdapterEngine(Protocol):
    """What the catalogue needs of workers.transport.EngineClient."""

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo: ...
    async def drop_adapter(self, digest: str) -> None: ...
    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo: ...
    async def unpin_adapter(self, digest: str) -> None: ...
    async def drained(self, digest: str) -> None: ...


async def obey(engine: AdapterEngine, order: Order) -> AdapterInfo | None:
    """What the directory orders of a replica."""
    match order.kind:
        case "load":
            return await engine.load_adapter(order.lora)
        case "pin":
            return await engine.pin_adapter(order.lora)
        case "unpin":
            await engine.unpin_adapter(order.lora.digest)
        case "drop":
            await asyncio.sleep(SETTLE_S)
            await engine.drained(order.lora.digest)
            await engine.drop_adapter(order.lora.digest)
    return None


class DirectoryCatalog:
    """The front's AdapterCatalog. Base model names never come here."""

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
        self._turns = Turns(SEARCHES)
        self._missed_at: dict[str, float] = {}
        self._resolving: dict[str, asyncio.Task[LoRARequest]] = {}

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        return await self._membership.listed(after, end, limit)

    @property
    def list_version(self) -> object | None:
        return self._membership.list_version

    async def known(self, name: str) -> LoRARequest | None:
        """None where only a resolver might know it."""
        served = await self._membership.lookup(name)
        return None if served is None else served.loras[0]

    async def resolve(self, name: str, key: str | None = None, group: str = "") -> LoRARequest:
        """group: whose turn it takes where resolvers must look for the name. Raises ModelNotFound, AdapterError where
        the adapter exists but cannot be served, and QueueFull."""
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
        """Registers the adapter with its files, and makes it known to every replica."""
        check_full_name(name, self._base_names)
        if not load_inplace and await self.known(name) is not None:
            raise AdapterExists(
                f"There is an adapter {name!r} already; allow `replace` for a new version.", "lora_name"
            )
        # What cannot be served is refused by its header, before its bytes, however many, are copied into the store.
        async with self._turn(name, turn_group(tenant_of(name), None)):
            await self._engine.load_adapter(LoRARequest(name, adapter_number(name), path, within=within))
        await self._admin.push_folder(
            name,
            path,
            within=within,
            replace=load_inplace,
            max_adapters=limits.adapters,
            max_bytes=limits.num_bytes,
        )
        return await self.resolve(name)

    async def read_at_start(self, name: str, path: str, base_model_name: str | None) -> tuple[LoRARequest, AdapterInfo]:
        """Nobody may ask for it before seed()."""
        check_adapter_name(name, self._base_names)
        return await self._read(LoRARequest(name, adapter_number(name), path, base_model_name=base_model_name))

    async def seed(self, lora: LoRARequest, info: AdapterInfo) -> LoRARequest | None:
        """None where the name was removed while other replicas ran: a restart does not bring it back."""
        return await self._admin.seed(lora, info)

    async def remove(self, name: str) -> None:
        """The adapter's bytes are freed when its requests have ended."""
        if await self.known(name) is None:
            raise _not_found(name)
        await self._admin.remove(name, wait_s=0)

    def _is_missing(self, name: str) -> bool:
        return self._clock() - self._missed_at.get(name, -MISS_S) < MISS_S

    async def _resolve_once(self, resolver: LoRAResolver, name: str, group: str) -> LoRARequest:
        task = self._resolving.get(name)
        if task is None:
            task = self._resolving[name] = asyncio.get_running_loop().create_task(
                self._find_in_turn(resolver, name, group)
            )
            task.add_done_callback(lambda _: self._resolving.pop(name, None))
        return await asyncio.shield(task)  # a client that leaves must not cancel the others' wait

    async def _find_in_turn(self, resolver: LoRAResolver, name: str, group: str) -> LoRARequest:
        async with self._turn(name, group):
            return await self._find(resolver, name)

    @asynccontextmanager
    async def _turn(self, name: str, group: str) -> AsyncIterator[None]:
        """A source may take minutes for each name: one tenant's names leave places for others'. Raises QueueFull."""
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
        if served is None:  # brought, and unloaded at once by somebody else
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
        return msgspec.structs.replace(lora, digest=info.digest), info


def _not_found(name: str) -> ModelNotFound:
    return ModelNotFound(f"The model `{name}` does not exist.", "model")
