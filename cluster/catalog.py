"""The adapters that a replica may answer for: the front's view of the directory.

A name is looked up in the replica's copy, then in the directory, then by the resolvers; what is found is read and
checked by the engine before anybody may use it, and its digest goes with it from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Callable
from typing import Protocol

from lorafleet.cluster.directory import Catalogue
from lorafleet.cluster.membership import Membership
from lorafleet.resolvers.base import LoRAResolver
from lorafleet.workers.errors import AdapterExists, InvalidAdapterName, ModelNotFound
from lorafleet.workers.lora.names import check_adapter_name
from lorafleet.workers.lora.request import AdapterInfo, LoRARequest

MISS_S = 2.0  # how long it is remembered that no resolver knows a name
MAX_MISSES = 10_000

logger = logging.getLogger("lorafleet.cluster")


class AdapterEngine(Protocol):
    """What the catalogue needs of workers.transport.EngineClient."""

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo: ...
    async def drop_adapter(self, digest: str) -> None: ...


class DirectoryCatalog:
    """The front's AdapterCatalog. Base model names never come here."""

    def __init__(
        self,
        membership: Membership,
        engine: AdapterEngine,
        base_names: list[str],
        resolver: LoRAResolver | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._engine = engine
        self._base_names = base_names
        self._resolver = resolver
        self._clock = clock
        self._missed_at: dict[str, float] = {}
        self._resolving: dict[str, asyncio.Task[LoRARequest]] = {}
        self._loading: dict[str, asyncio.Lock] = {}

    def entries(self) -> list[LoRARequest]:
        return list(self._membership.catalogue.entries.values())

    async def resolve(self, name: str) -> LoRARequest:
        """Raises ModelNotFound, or AdapterError where the adapter exists but cannot be served."""
        entry = await self._membership.lookup(name)
        if entry is not None:
            return entry
        if self._resolver is None or self._is_missing(name):
            raise _not_found(name)
        return await self._resolve_once(self._resolver, name)

    async def add(self, name: str, path: str, *, load_inplace: bool) -> LoRARequest:
        """Reads and checks the adapter here, then makes it known to every replica."""
        check_adapter_name(name, self._base_names)
        async with self._loading.setdefault(name, asyncio.Lock()):
            if not load_inplace and await self._membership.lookup(name) is not None:
                raise AdapterExists(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                    "set 'load_inplace' to True.",
                    "lora_name",
                )
            entry = await self._read(LoRARequest(name, adapter_number(name), path))
            return await self._membership.publish(entry, replace=load_inplace, wait=True)

    async def read_at_start(self, name: str, path: str, base_model_name: str | None) -> LoRARequest:
        """Nobody may ask for it before seed()."""
        check_adapter_name(name, self._base_names)
        return await self._read(LoRARequest(name, adapter_number(name), path, base_model_name=base_model_name))

    async def seed(self, entry: LoRARequest) -> LoRARequest | None:
        """None where the name was unloaded while other replicas ran: a restart does not bring it back."""
        return await self._membership.seed(entry)

    async def remove(self, name: str) -> None:
        await self._membership.retract(name)

    def _is_missing(self, name: str) -> bool:
        return self._clock() - self._missed_at.get(name, -MISS_S) < MISS_S

    async def _resolve_once(self, resolver: LoRAResolver, name: str) -> LoRARequest:
        task = self._resolving.get(name)
        if task is None:
            task = self._resolving[name] = asyncio.get_running_loop().create_task(self._find(resolver, name))
            task.add_done_callback(lambda _: self._resolving.pop(name, None))
        return await asyncio.shield(task)  # a client that leaves must not cancel the others' wait

    async def _find(self, resolver: LoRAResolver, name: str) -> LoRARequest:
        try:
            check_adapter_name(name, self._base_names)
            found = await resolver.resolve_lora(self._base_names[0], name)
        except InvalidAdapterName:
            found = None
        if found is None:
            self._remember_miss(name)
            raise _not_found(name)
        try:
            return await self._membership.publish(await self._read(found), replace=False, wait=False)
        except AdapterExists:  # another replica was first
            return await self.resolve(name)

    def _remember_miss(self, name: str) -> None:
        if len(self._missed_at) >= MAX_MISSES:
            self._missed_at.clear()
        self._missed_at[name] = self._clock()

    async def _read(self, lora: LoRARequest) -> LoRARequest:
        started = self._clock()
        info = await self._engine.load_adapter(lora)
        load_s = self._clock() - started
        logger.info("adapter %s: rank %d, %d bytes, read in %.3f s", lora.lora_name, info.rank, info.num_bytes, load_s)
        return LoRARequest(lora.lora_name, lora.lora_int_id, lora.lora_path, info.digest, lora.base_model_name)


async def drop_unnamed(engine: AdapterEngine, before: Catalogue, after: Catalogue) -> None:
    """Frees the adapters that no name stands for any more, in this replica's worker."""
    named = {entry.digest for entry in after.entries.values()}
    for digest in {entry.digest for entry in before.entries.values()} - named:
        await engine.drop_adapter(digest)


def adapter_number(name: str) -> int:
    """A positive number for callers that want one; the digest is the identity."""
    return 1 + zlib.crc32(name.encode()) % (2**31 - 2)


def _not_found(name: str) -> ModelNotFound:
    return ModelNotFound(f"The model `{name}` does not exist.", "model")
