"""A directory that is silent, restarts or is away: what replicas and requests have of it meanwhile, and afterwards."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_log import CatalogueLog
from lorafleet.cluster.catalogue.catalogue_records import RemovalRecord
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_calls import Answer, DirectoryCall, LookupCall, WatchCall
from lorafleet.cluster.directory.residency import RouteView
from lorafleet.cluster.routing.routing import ReplicaChooser
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.errors import ModelNotFound, Overloaded, StoreError
from lorafleet.protocol.names import PAST_ALL
from tests.cluster.directory.conftest import QUICK, Engine, Folder, Make, full_report, loaded, replica, until


class Silent(AdapterDirectory):
    """Stops answering the watch calls of one replica."""

    silent = ""

    async def ask(self, call: DirectoryCall[Answer]) -> Answer:
        if isinstance(call, WatchCall) and call.replica_id == self.silent:
            await asyncio.Event().wait()
        return await super().ask(call)


async def test_a_replica_that_hears_nothing_asks_before_it_answers(catalogue: Catalogue, make: Make) -> None:
    directory = await loaded(Silent(catalogue, timing=QUICK))
    new = folder_digest(Path(make("new")))
    async with replica(directory, "r1", Engine()) as one:
        await one.add("sql", make("old"), load_inplace=False)
        async with replica(directory, "r2", Engine()) as deaf:
            assert (await deaf.resolve("sql")).digest != new
            directory.silent = "r2"
            await asyncio.sleep(0.06)  # its last watch call has been answered
            directory.replicas.forget("r2")  # nothing is ordered of it
            await directory.names.lookup(directory.epoch.id, "sql")
            directory.replicas.record_call("r2")
            await one.add("sql", make("new"), load_inplace=True)  # waits until the lease of r2 is over
            assert (await deaf.resolve("sql")).digest == new
            await one.remove("sql")
            with pytest.raises(ModelNotFound):
                await deaf.resolve("sql")


class Restartable(AdapterDirectory):
    async def restart(self, *, load: bool = True) -> None:
        """Forgets everything but the catalogue's files, as a new process of the directory does."""
        self.__init__(Catalogue(self.catalogue.store), timing=self.timing)  # type: ignore[misc]  # on purpose
        if load:
            await self.load()


async def test_a_restarted_directory_has_the_catalogue_and_learns_from_replicas_what_resolvers_found(
    catalogue: Catalogue, make: Make
) -> None:
    directory, folder = await loaded(Restartable(catalogue, timing=QUICK)), Folder(make, "cold")
    async with replica(directory, "r1", Engine(), folder) as one, replica(directory, "r2", Engine(), folder) as two:
        await one.add("sql", make("x"), load_inplace=False)
        await one.add("gone", make("y"), load_inplace=False)
        await one.remove("gone")
        cold = await one.resolve("cold")
        await directory.restart()
        assert (await two.resolve("sql")).digest == folder_digest(Path(make("x")))
        await until(lambda: "cold" in directory.names.found)  # r1 has joined anew
        assert await two.resolve("cold") == cold
        assert folder.asked == ["cold"]
        await two.add("new", make("y"), load_inplace=False)
        assert sorted(e.lora_name for e in await one.listed("", PAST_ALL, 1000)) == ["cold", "new", "sql"]


class SlowStore(FolderStore):
    """The log is read when `ready` is set; `broken`: it cannot be."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ready = threading.Event()
        self.ready.set()
        self.broken = False

    def keys(self, prefix: str) -> list[str]:
        self.ready.wait()
        if self.broken:
            raise StoreError("the bucket is away")
        return super().keys(prefix)


async def restarted_before_its_log_can_be_read(directory: Restartable, store: SlowStore) -> asyncio.Task[None]:
    """Its load, which ends once store.ready is set."""
    store.ready.clear()
    await directory.restart(load=False)
    return asyncio.create_task(directory.load())


async def test_requests_do_not_wait_while_a_restarted_directory_reads_a_large_catalogue(
    tmp_path: Path, make: Make
) -> None:
    store = SlowStore(tmp_path / "catalogue")
    directory = await loaded(Restartable(Catalogue(store), timing=QUICK))
    async with replica(directory, "r1", Engine()) as one:
        sql = await one.add("sql", make("x"), load_inplace=False)
        table = RouteView(ReplicaChooser())
        table.chooser.set_replicas(["r1"])
        assert directory.routers.accept(full_report("r1", {sql.digest: "gpu"}))
        table.apply(await directory.routers.routes("", -1))
        loading = await restarted_before_its_log_can_be_read(directory, store)
        await asyncio.sleep(2 * QUICK.lease_s)
        assert await asyncio.wait_for(one.resolve("sql"), 60) == sql
        assert directory.routers.accept(full_report("r1", {sql.digest: "cpu"}))
        table.apply(await directory.routers.routes(table.epoch, table.version))
        assert table.chooser._tiers == {sql.digest: {"r1": "cpu"}}
        assert table.adapter("sql") == sql.digest, "names that a router has hold on"
        unknown = asyncio.create_task(one.resolve("other"))
        await asyncio.sleep(0.05)
        assert not unknown.done(), "only the catalogue knows"
        store.ready.set()
        await loading
        with pytest.raises(ModelNotFound):
            await unknown
        routes = await directory.routers.routes(table.epoch, table.version)
        assert (routes.full, routes.names) == (True, {"sql": (sql.digest,)})


async def test_copies_of_before_a_restart_are_compared_with_the_catalogue_once_it_is_read(
    tmp_path: Path, make: Make
) -> None:
    store = SlowStore(tmp_path / "catalogue")
    directory = await loaded(Restartable(Catalogue(store), timing=QUICK))
    async with replica(directory, "r1", Engine()) as one:
        await one.add("sql", make("x"), load_inplace=False)
        loading = await restarted_before_its_log_can_be_read(directory, store)
        await asyncio.sleep(0.1)
        # Written just before the process died, and acknowledged to nobody.
        log = CatalogueLog(FolderStore(tmp_path / "catalogue"))
        log.load()
        log.append(RemovalRecord("sql"))
        store.ready.set()
        await loading
        await asyncio.sleep(0.1)
        with pytest.raises(ModelNotFound):
            await one.resolve("sql")


async def test_a_catalogue_that_cannot_be_read_is_said_to_all_who_need_it_until_it_can(tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "catalogue")
    directory = Restartable(Catalogue(store), timing=QUICK)
    store.broken = True
    with pytest.raises(StoreError, match="away"):
        await directory.load()
    async with replica(directory, "r1", Engine()) as one:
        with pytest.raises(StoreError, match="away"):
            await one.resolve("sql")
        store.broken = False
        await directory.load()
        with pytest.raises(ModelNotFound):
            await one.resolve("sql")


async def test_a_write_right_after_a_restart_waits_for_leases_of_before(catalogue: Catalogue, make: Make) -> None:
    directory = await loaded(Restartable(catalogue, timing=QUICK))
    async with replica(directory, "r1", Engine()) as one:
        await one.add("sql", make("x"), load_inplace=False)
        await directory.restart()
        started = asyncio.get_running_loop().time()
        await one.add("sql", make("y"), load_inplace=True)
        assert asyncio.get_running_loop().time() - started > QUICK.lease_s


class Away(AdapterDirectory):
    away = False

    async def ask(self, call: DirectoryCall[Answer]) -> Answer:
        if self.away and isinstance(call, LookupCall):
            raise ConnectionError("away")
        return await super().ask(call)


async def test_a_directory_that_is_away_is_an_error_in_the_end(catalogue: Catalogue) -> None:
    directory = await loaded(Away(catalogue, timing=replace(QUICK, patience_s=0.5)))
    async with replica(directory, "r1", Engine()) as one:
        directory.away = True
        with pytest.raises(Overloaded, match="directory"):
            await one.resolve("sql")
        directory.away = False
