"""Administration from a replica's side: brings an adapter's files into the store, then asks the directory to serve it.

The files go straight from here to the store; the directory hears their digest only.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lorafleet.cluster.administration import REMOVE_S, Pushed
from lorafleet.cluster.catalogue.files import stage
from lorafleet.cluster.catalogue.records import Adapter, Share, Version
from lorafleet.cluster.catalogue.store import Store
from lorafleet.workers.lora.files import AdapterFolder
from lorafleet.workers.lora.names import check_full_name
from lorafleet.workers.lora.request import AdapterInfo, LoRARequest

Administer = Callable[[str, dict[str, Any]], Awaitable[Any]]
OpenSource = Callable[[str], AbstractContextManager[Path]]


class AdapterAdmin:
    """administer: calls a method of Administration by name, wherever it runs. application: of this deployment, see
    Administration.seed. open_source: the folder of a path or URI, which stays until the end of the block."""

    def __init__(
        self,
        administer: Administer,
        store: Store,
        base_names: list[str],
        application: str,
        open_source: OpenSource,
    ) -> None:
        self._administer = administer
        self._store = store
        self._base_names = base_names
        self._application = application
        self._open_source = open_source

    async def push_folder(self, name: str, path: str, *, within: str | None = None, **options: Any) -> Adapter:
        """From a folder that this process sees, which lies in `within` where that is given, or a URI. options: of
        Pushed. Raises AdapterError."""
        check_full_name(name, self._base_names)
        digest = await asyncio.to_thread(self._put_files, path, within)
        pushed = Pushed(name, digest, **{"source": path, **options})
        adapter: Adapter = await self._administer("push", {"pushed": pushed})
        return adapter

    def _put_files(self, path: str, within: str | None) -> str:
        with self._open_source(path) as source, tempfile.TemporaryDirectory(prefix="lorafleet-push-") as folder:
            digest = stage(AdapterFolder.at(source, within), Path(folder))
            self._store.put_files(digest, Path(folder))
            return digest

    async def seed(self, lora: LoRARequest, info: AdapterInfo) -> LoRARequest | None:
        seeded: LoRARequest | None = await self._administer(
            "seed", {"lora": lora, "info": info, "application": self._application}
        )
        return seeded

    async def list_adapters(self, after: str, limit: int, tenant: str | None) -> list[Adapter]:
        arguments = {"after": after, "limit": limit, "tenant": tenant}
        adapters: list[Adapter] = await self._administer("list_adapters", arguments)
        return adapters

    async def show(self, name: str) -> Adapter:
        return await self._adapter("show", name)

    async def verify(self, name: str) -> list[Version]:
        versions: list[Version] = await self._administer("verify", {"name": name})
        return versions

    async def alias(self, name: str, shares: list[Share], alias: str | None) -> Adapter:
        return await self._adapter("alias", name, shares=shares, alias=alias)

    async def unalias(self, name: str, alias: str) -> Adapter:
        return await self._adapter("unalias", name, alias=alias)

    async def rollback(self, name: str, alias: str | None) -> Adapter:
        return await self._adapter("rollback", name, alias=alias)

    async def pin(self, name: str, num_replicas: int) -> Adapter:
        return await self._adapter("pin", name, num_replicas=num_replicas)

    async def unpin(self, name: str) -> Adapter:
        return await self._adapter("unpin", name)

    async def prefetch(self, name: str, num_replicas: int) -> list[str]:
        replicas: list[str] = await self._administer("prefetch", {"name": name, "num_replicas": num_replicas})
        return replicas

    async def remove(self, name: str, wait_s: float = REMOVE_S) -> None:
        await self._administer("remove", {"name": name, "wait_s": wait_s})

    async def _adapter(self, verb: str, name: str, **arguments: Any) -> Adapter:
        adapter: Adapter = await self._administer(verb, {"name": name, **arguments})
        return adapter
