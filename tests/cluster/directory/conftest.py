"""Replicas in one event loop with a directory, without Ray: adapters are tiny files, and engines only read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.directory.residency import Report
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog, obey
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.admin_verbs import Verb
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import AdapterMissing
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore

Make = Callable[[str], str]
# Leases end soon, but no replica seems to be silent where the machine is slow.
QUICK = DirectoryTiming(hold_s=0.05, lease_s=0.6, acknowledge_s=0.9, patience_s=60.0, retry_s=0.01)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Folders of adapters, made when they are first named; their weights are their name."""

    def adapter(name: str) -> str:
        folder = tmp_path / "adapters" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_text(name)
        return str(folder)

    return adapter


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(FolderStore(tmp_path / "catalogue"))


D = TypeVar("D", bound=AdapterDirectory)
T = TypeVar("T")


async def loaded(directory: D) -> D:
    await directory.load()
    return directory


class Engine:
    """Reads files, but understands nothing of them: "bad" ones fail."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.held: set[str] = set()
        self.pinned: set[str] = set()
        self.controls: list[EngineControl] = []
        self.busy: dict[str, asyncio.Event] = {}  # digests with requests in flight, until they end

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        self.reads.append(lora.lora_path)
        await asyncio.sleep(0.01)
        digest = folder_digest(Path(lora.lora_path))
        if (Path(lora.lora_path) / "adapter_model.safetensors").read_text() == "bad":
            raise AdapterMissing(f"{lora.lora_path} is bad")
        self.held.add(digest)
        return AdapterInfo(digest, 8, 1, ["q_proj"], left_out=("visual",))

    async def drop_adapter(self, digest: str) -> None:
        self.held.discard(digest)

    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo:
        info = await self.load_adapter(lora)
        self.pinned.add(info.digest)
        return info

    async def unpin_adapter(self, digest: str) -> None:
        self.pinned.discard(digest)

    async def drained(self, digest: str) -> None:
        if digest in self.busy:
            await self.busy[digest].wait()

    async def control(self, control: EngineControl) -> None:
        self.controls.append(control)


class Folder:
    def __init__(self, make: Make, *names: str) -> None:
        self.make, self.names = make, names
        self.asked: list[str] = []

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append(lora_name)
        await asyncio.sleep(0.01)
        if lora_name not in self.names:
            return None
        return LoRARequest(lora_name, 1, self.make(lora_name), base_model_name=base_model_name)


@asynccontextmanager
async def replica(
    directory: AdapterDirectory, name: str, engine: Engine, folder: Folder | None = None
) -> AsyncIterator[DirectoryCatalog]:
    async def administer(verb: Verb[T]) -> T:
        return await Administration(directory, ["base"]).carry_out(verb)

    membership = Membership(directory, name, lambda order: obey(engine, order, settle_s=0.01), timing=directory.timing)
    await membership.start()
    await membership.become_ready()
    admin = AdapterAdmin(administer, directory.catalogue.store, ["base"], "run", AdapterStore(SourcesConfig()))
    try:
        yield DirectoryCatalog(membership, admin, engine, ["base"], folder)
    finally:
        await membership.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)


def full_report(replica_id: str, tiers: dict[str, Tier], tokens: dict[str, int] | None = None) -> Report:
    return Report(replica_id, 1, True, dict(tiers), ReplicaLoad(), tokens or {}, cpu_loras=8)
