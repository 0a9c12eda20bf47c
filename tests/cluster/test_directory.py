"""The directory, the replicas' copies of it and the catalogue upon them, in one event loop and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lorafleet.cluster import directory as directory_module
from lorafleet.cluster import membership as membership_module
from lorafleet.cluster.catalog import DirectoryCatalog
from lorafleet.cluster.directory import AdapterDirectory, Catalogue, Directory, Load
from lorafleet.cluster.membership import Membership
from lorafleet.workers.errors import AdapterExists, AdapterMissing, InvalidAdapterName, ModelNotFound, Overloaded
from lorafleet.workers.lora.request import AdapterInfo, LoRARequest


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second here is 50 ms."""
    monkeypatch.setattr(directory_module, "HOLD_S", 0.05)
    monkeypatch.setattr(membership_module, "LEASE_S", 0.2)
    monkeypatch.setattr(directory_module, "ACKNOWLEDGE_S", 0.3)
    monkeypatch.setattr(membership_module, "PATIENCE_S", 0.5)
    monkeypatch.setattr(membership_module, "RETRY_S", 0.01)


class Disk:
    """An engine that "reads" what files says: path -> digest."""

    def __init__(self, **files: str) -> None:
        self.files = files
        self.reads: list[str] = []
        self.dropped: list[str] = []

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        self.reads.append(lora.lora_path)
        await asyncio.sleep(0.01)
        if lora.lora_path not in self.files:
            raise AdapterMissing(f"no adapter in {lora.lora_path}")
        return AdapterInfo(self.files[lora.lora_path], 8, 1, ["q_proj"])

    async def drop_adapter(self, digest: str) -> None:
        self.dropped.append(digest)


class Folder:
    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[str] = []

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append(lora_name)
        await asyncio.sleep(0.01)
        return (
            LoRARequest(lora_name, 1, lora_name, base_model_name=base_model_name) if lora_name in self.names else None
        )


async def ignore(before: Catalogue, after: Catalogue) -> None:
    pass


@asynccontextmanager
async def replica(
    directory: Directory, name: str, disk: Disk, folder: Folder | None = None
) -> AsyncIterator[DirectoryCatalog]:
    membership = Membership(directory, name, ignore)
    await membership.start()
    try:
        yield DirectoryCatalog(membership, disk, ["base"], folder)
    finally:
        await membership.stop()


async def test_a_write_is_known_everywhere_when_it_returns() -> None:
    directory, disk = AdapterDirectory(), Disk(old="d1", new="d2")
    async with replica(directory, "r1", disk) as one, replica(directory, "r2", disk) as two:
        await one.add("sql", "old", load_inplace=False)
        assert [e.digest for e in two.entries()] == ["d1"]
        await two.add("sql", "new", load_inplace=True)
        assert [e.digest for e in one.entries()] == ["d2"]
        await one.remove("sql")
        assert two.entries() == []
        with pytest.raises(ModelNotFound):
            await two.resolve("sql")


async def test_a_name_is_taken_once() -> None:
    directory, disk = AdapterDirectory(), Disk(x="d")
    async with replica(directory, "r1", disk) as one, replica(directory, "r2", disk) as two:
        results = await asyncio.gather(
            *(c.add("sql", "x", load_inplace=False) for c in (one, two, one)), return_exceptions=True
        )
        assert [type(r) for r in results].count(AdapterExists) == 2


async def test_bad_files_and_names_register_nothing() -> None:
    directory = AdapterDirectory()
    async with replica(directory, "r1", Disk()) as one:
        with pytest.raises(AdapterMissing):
            await one.add("sql", "nowhere", load_inplace=False)
        for name in ("", "../x", "a\nb", "base"):
            with pytest.raises(InvalidAdapterName):
                await one.add(name, "x", load_inplace=False)
        assert one.entries() == []


class Silent(AdapterDirectory):
    """Stops answering the watch calls of one replica."""

    silent = ""

    async def watch(self, replica_id: str, epoch: str, version: int) -> Catalogue:
        if replica_id == self.silent:
            await asyncio.Event().wait()
        return await super().watch(replica_id, epoch, version)


async def test_a_replica_that_hears_nothing_asks_before_it_answers() -> None:
    directory, disk = Silent(), Disk(old="d1", new="d2")
    async with replica(directory, "r1", disk) as one, replica(directory, "r2", disk) as deaf:
        await one.add("sql", "old", load_inplace=False)
        directory.silent = "r2"
        await asyncio.sleep(0.06)  # its last watch call has been answered
        await one.add("sql", "new", load_inplace=True)  # waits until the lease of r2 is over
        assert [e.digest for e in deaf.entries()] == ["d1"]
        assert (await deaf.resolve("sql")).digest == "d2"
        await one.remove("sql")
        with pytest.raises(ModelNotFound):
            await deaf.resolve("sql")


async def test_a_restarted_directory_learns_from_the_replicas() -> None:
    front, disk = Restartable(), Disk(x="d1", y="d2")
    async with replica(front, "r1", disk) as one, replica(front, "r2", disk) as two:
        await one.add("sql", "x", load_inplace=False)
        await one.add("gone", "y", load_inplace=False)
        await one.remove("gone")
        front.restart()
        assert (await two.resolve("sql")).digest == "d1"
        await two.add("new", "y", load_inplace=False)
        assert sorted(e.lora_name for e in one.entries()) == ["new", "sql"]
        assert await two.seed(await two.read_at_start("gone", "y", None)) is None


class Restartable(AdapterDirectory):
    def restart(self) -> None:
        self.__init__()  # type: ignore[misc]  # what a new process would do


async def test_a_directory_that_is_away_is_an_error_in_the_end() -> None:
    directory = Away()
    async with replica(directory, "r1", Disk()) as one:
        directory.away = True
        with pytest.raises(Overloaded, match="directory"):
            await one.resolve("sql")
        directory.away = False


class Away(AdapterDirectory):
    away = False

    async def lookup(self, epoch: str, name: str) -> LoRARequest | None:
        if self.away:
            raise ConnectionError("away")
        return await super().lookup(epoch, name)


async def test_concurrent_requests_share_one_resolution_and_misses_are_remembered() -> None:
    directory, disk, folder = AdapterDirectory(), Disk(cold="d"), Folder("cold")
    async with replica(directory, "r1", disk, folder) as one, replica(directory, "r2", disk, folder) as two:
        found = await asyncio.gather(*(one.resolve("cold") for _ in range(10)))
        assert {e.digest for e in found} == {"d"}
        assert (folder.asked, disk.reads) == (["cold"], ["cold"])
        assert (await two.resolve("cold")).digest == "d"
        for _ in range(3):
            with pytest.raises(ModelNotFound):
                await one.resolve("nobody")
        assert folder.asked == ["cold", "nobody"]


async def test_an_adapter_from_the_start_does_not_undo_what_was_done_since() -> None:
    directory, disk = AdapterDirectory(), Disk(old="d1", new="d2")
    async with replica(directory, "r1", disk) as one:
        await one.seed(await one.read_at_start("sql", "old", None))
        await one.add("sql", "new", load_inplace=True)
        async with replica(directory, "r2", disk) as two:
            entry = await two.seed(await two.read_at_start("sql", "old", None))
            assert entry is not None and entry.digest == "d2"


async def test_routes_name_the_holders_by_tier() -> None:
    directory, disk = AdapterDirectory(), Disk(x="d1", y="d2")
    async with replica(directory, "r1", disk) as one, replica(directory, "r2", disk):
        await one.add("sql", "x", load_inplace=False)
        await one.add("alias", "x", load_inplace=False)
        await directory.report("r1", Load(("d1",), ("d1", "d2"), 3))
        await directory.report("r2", Load((), ("d1",), 1))
        table = await directory.routes(-1)
        assert table.gpu == {"sql": ("r1",), "alias": ("r1",)}
        assert table.cpu["sql"] == ("r1", "r2")
        assert table.num_requests == {"r1": 3, "r2": 1}
        await directory.leave("r1")
        assert (await directory.routes(table.version)).gpu == {}
