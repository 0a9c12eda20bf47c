"""Administration from a replica's side: copies an adapter's files into the store, then asks the directory to serve it.

The files go straight from here to the store. The directory receives only their digest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.cluster.admin.administration import REMOVE_S, Pushed
from lorafleet.cluster.catalogue.catalogue_files import stage
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Share, VersionRecord
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.protocol.adapter_files import AdapterFolder
from lorafleet.protocol.errors import StoreRefused
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, turn_group
from lorafleet.protocol.names import check_full_name, tenant_of
from lorafleet.sandbox.job_turns import TurnLimits

# A push copies gigabytes, and may wait for its source for minutes. `running` limits the pushes of all tenants,
# `waiting` those of one tenant.
PUSHES = TurnLimits(running=4, waiting=128)

Administer = Callable[[str, dict[str, Any]], Awaitable[Any]]
OpenSource = Callable[[str], AbstractContextManager[Path]]

T = TypeVar("T")


class AdapterAdmin:
    """The administration calls of a replica.

    Args:
        administer: calls a method of Administration by name, in whichever process it runs.
        application: identifies this deployment; see Administration.seed.
        open_source: opens the folder of a path or URI, which exists until the end of the block.
    """

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
        self._threads = FairThreads("pushes", PUSHES)

    async def run_in_turn(self, name: str, work: Callable[[], T]) -> T:
        """Runs a part of a push in a thread, for which tenants take turns. `name` is the adapter's full name, which
        says the tenant. Raises QueueFull if too many pushes of the tenant wait, and StoreRefused if the temporary
        folder is full."""

        def run() -> T:
            with as_store_error():
                return work()

        return await self._threads.run(turn_group(tenant_of(name), None), run)

    def close(self) -> None:
        self._threads.close()

    async def push_folder(self, name: str, path: str, *, within: str | None = None, **options: Any) -> AdapterRecord:
        """Pushes an adapter from a URI or from a folder that this process can read. If `within` is given, the folder
        must lie in it. `options` are further fields of Pushed. Raises AdapterError."""
        check_full_name(name, self._base_names)
        digest = await self.run_in_turn(name, lambda: self._put_files(path, within))
        pushed = Pushed(name, digest, **{"source": path, **options})
        adapter: AdapterRecord = await self._administer("push", {"pushed": pushed})
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

    async def list_adapters(self, after: str, limit: int, tenant: str | None) -> list[AdapterRecord]:
        arguments = {"after": after, "limit": limit, "tenant": tenant}
        adapters: list[AdapterRecord] = await self._administer("list_adapters", arguments)
        return adapters

    async def show(self, name: str) -> AdapterRecord:
        return await self._adapter("show", name)

    async def verify(self, name: str) -> list[VersionRecord]:
        versions: list[VersionRecord] = await self._administer("verify", {"name": name})
        return versions

    async def alias(self, name: str, shares: list[Share], alias: str | None) -> AdapterRecord:
        return await self._adapter("alias", name, shares=shares, alias=alias)

    async def unalias(self, name: str, alias: str) -> AdapterRecord:
        return await self._adapter("unalias", name, alias=alias)

    async def rollback(self, name: str, alias: str | None) -> AdapterRecord:
        return await self._adapter("rollback", name, alias=alias)

    async def pin(self, name: str, num_replicas: int) -> AdapterRecord:
        return await self._adapter("pin", name, num_replicas=num_replicas)

    async def unpin(self, name: str) -> AdapterRecord:
        return await self._adapter("unpin", name)

    async def prefetch(self, name: str, num_replicas: int) -> list[str]:
        replicas: list[str] = await self._administer("prefetch", {"name": name, "num_replicas": num_replicas})
        return replicas

    async def remove(self, name: str, wait_s: float = REMOVE_S) -> None:
        await self._administer("remove", {"name": name, "wait_s": wait_s})

    async def _adapter(self, verb: str, name: str, **arguments: Any) -> AdapterRecord:
        adapter: AdapterRecord = await self._administer(verb, {"name": name, **arguments})
        return adapter


@contextmanager
def as_store_error() -> Iterator[None]:
    """Converts an OSError to StoreRefused, as a fault of the disk that files are copied to.

    Faults of the files that are read have errors of their own.
    """
    try:
        yield
    except OSError as error:
        raise StoreRefused(
            f"The adapter's files cannot be copied to the temporary folder: {error.strerror or error}. Nothing was "
            "pushed. Make room there, or set TMPDIR."
        ) from error
