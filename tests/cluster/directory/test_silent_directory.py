"""A directory that is stopped or slow: every call ends in time with a 503, and adapters that a replica knows are served
as long as the catalogue's log shows that nothing was changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorafleet.api.answer.error_responses import http_error
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_log import MAX_CHANGES, CatalogueLog
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, AliasMove, RemovalRecord, Share, VersionRecord
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.log_end import LogEnd, LogPosition, read_store_id
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_calls import Answer, DirectoryCall, JoinCall, WatchCall
from lorafleet.cluster.directory.membership import CHANGE_S, Membership
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog, obey
from lorafleet.cluster.tenancy.quota_book import Ask, Limits
from lorafleet.protocol.errors import DirectoryUnavailable
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.names import full_name
from tests.cluster.directory.conftest import QUICK, Engine, loaded

HASTY = replace(QUICK, patience_s=1.5)  # Nobody waits for a silent directory for long.
SQL = AdapterRecord(
    "sql",
    (VersionRecord(1, "digest of it", "", 8, 1, 0.0),),
    {name: (AliasMove(0.0, (Share(1, 1.0),)),) for name in ("sql", "sql-stable")},
)
LATE_S = 60.0  # of a call that should have ended long ago, however slow the machine is


class Stoppable(AdapterDirectory):
    """Answers nothing while `goes` is not set, as a process that is stopped."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue, timing=HASTY)
        self.goes = asyncio.Event()
        self.goes.set()
        self.slow: Callable[[DirectoryCall[Any]], float] = lambda _: 0.0  # Seconds until a call is answered.

    async def ask(self, call: DirectoryCall[Answer]) -> Answer:
        limit_s = (
            0.2 if isinstance(call, WatchCall | JoinCall) else None
        )  # The other calls wait for ANSWER_S of directory_calls.py.
        async with asyncio.timeout(limit_s):
            await asyncio.sleep(self.slow(call))
            await self.goes.wait()
            return await super().ask(call)


@dataclass
class Replica:
    directory: Stoppable
    membership: Membership
    catalog: DirectoryCatalog
    store: FolderStore

    async def stop_directory(self) -> None:
        self.directory.goes.clear()
        await until(lambda: not self.membership.fresh)


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + LATE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(folder: Path, store_of_replica: Path | None = None) -> AsyncIterator[Replica]:
    store = FolderStore(folder)
    log = CatalogueLog(store)
    log.load()
    own = full_name("acme", "own")
    for adapter in (SQL, msgspec.structs.replace(SQL, name=own, aliases={own: SQL.aliases["sql"]})):
        log.append(adapter)
    directory = await loaded(Stoppable(Catalogue(store)))
    engine = Engine()
    log_end = LogEnd(lambda: FolderStore(store_of_replica or folder), LATE_S)
    membership = Membership(
        directory, "r0", lambda order: obey(engine, order, settle_s=0.01), log_end=log_end, timing=HASTY
    )
    await membership.start()
    catalog = DirectoryCatalog(membership, None, engine, ["base"], None)  # type: ignore[arg-type]  # nothing is changed here
    try:
        yield Replica(directory, membership, catalog, store)
    finally:
        directory.goes.set()
        await membership.stop()


async def test_known_names_are_served_without_the_directory_and_unknown_ones_are_refused_in_time(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as replica:
        known = await replica.catalog.resolve("sql")
        assert await replica.catalog.known(full_name("acme", "sql")) is None  # asked for first, for a tenant
        await replica.stop_directory()
        assert await replica.catalog.resolve("sql") == known
        assert await replica.catalog.known(full_name("acme", "sql")) is None
        for _ in range(3):
            with pytest.raises(DirectoryUnavailable, match="does not answer") as refused:
                await asyncio.wait_for(replica.catalog.resolve(full_name("acme", "own")), LATE_S)
        assert (http_error(refused.value).status, http_error(refused.value).code) == (503, "directory_unavailable")
        assert await replica.catalog.resolve("sql") == known
        replica.directory.goes.set()
        deadline = asyncio.get_running_loop().time() + LATE_S
        while True:
            try:
                assert (await replica.catalog.resolve(full_name("acme", "own"))).digest
                break
            except DirectoryUnavailable:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.01)


async def test_every_kind_of_call_ends_in_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as replica:
        await replica.stop_directory()
        membership = replica.membership
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: membership.found(LoRARequest("x", 1, "/x", "x")),
            lambda: membership.listed("", "~", 10),
            lambda: membership.admit([Ask({"tenant": Limits(1, 1, 1)}, 1)], {}, {}),
            lambda: membership.call(lambda _: asyncio.sleep(3600), CHANGE_S),
        ]
        for call in calls:
            with pytest.raises(DirectoryUnavailable):
                await asyncio.wait_for(call(), LATE_S)


async def test_once_it_is_known_to_be_silent_no_request_waits_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as replica:
        await replica.stop_directory()
        with pytest.raises(DirectoryUnavailable):
            await replica.catalog.resolve("unknown")
        asked = 0

        async def ask(_: str) -> None:
            nonlocal asked
            asked += 1

        with pytest.raises(DirectoryUnavailable):
            await replica.membership.call(ask)
        assert asked == 0, "nothing is queued at a process that is stopped"


async def test_a_change_that_another_server_made_is_never_missed_while_the_directory_is_silent(tmp_path: Path) -> None:
    async with serving(tmp_path) as replica:
        known = await replica.catalog.resolve("sql")
        await replica.stop_directory()
        assert await replica.catalog.resolve("sql") == known
        log = CatalogueLog(replica.store)
        log.load()
        log.append(AdapterRecord("sql", removing=True))
        with pytest.raises(DirectoryUnavailable):
            await replica.catalog.resolve("sql")


@pytest.mark.parametrize("own_name", [True, False])
async def test_changes_of_other_adapters_do_not_stop_the_names_that_are_known(tmp_path: Path, own_name: bool) -> None:
    """A directory that falls silent has always just written something, where adapters come and go all the time."""
    async with serving(tmp_path) as replica:
        name = "sql" if own_name else "sql-stable"
        absent = full_name("acme", "sql")
        known = await replica.catalog.resolve(name)
        assert await replica.catalog.known(absent) is None
        await replica.stop_directory()
        log = CatalogueLog(replica.store)
        log.load()
        log.append(RemovalRecord("other"))
        log.append(msgspec.structs.replace(SQL, name="another", aliases={"another": SQL.aliases["sql"]}))
        assert await replica.catalog.resolve(name) == known
        assert await replica.catalog.known(absent) is None
        log.append(msgspec.structs.replace(SQL, aliases={"sql": SQL.aliases["sql"]}))  # the other alias is gone
        log.append(msgspec.structs.replace(SQL, name="late", aliases={absent: SQL.aliases["sql"]}))
        for one in (name, absent):
            with pytest.raises(DirectoryUnavailable):
                await replica.catalog.resolve(one)


async def test_too_many_changes_are_not_read(tmp_path: Path) -> None:
    async with serving(tmp_path) as replica:
        known = await replica.catalog.resolve("sql")
        await replica.stop_directory()
        log = CatalogueLog(replica.store)
        log.load()
        for _ in range(MAX_CHANGES):
            log.append(RemovalRecord("other"))
        assert await replica.catalog.resolve("sql") == known
        log.append(RemovalRecord("other"))
        with pytest.raises(DirectoryUnavailable):
            await replica.catalog.resolve("sql")


async def test_an_empty_folder_of_the_same_name_on_another_node_vouches_for_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path / "catalogue", tmp_path / "elsewhere") as replica:
        await replica.catalog.resolve("sql")
        await replica.stop_directory()
        with pytest.raises(DirectoryUnavailable):
            await replica.catalog.resolve("sql")


async def test_a_slow_directory_does_not_slow_the_names_that_are_known(tmp_path: Path) -> None:
    async with serving(tmp_path) as replica:
        known = await replica.catalog.resolve("sql")
        replica.directory.slow = lambda call: 0.1 if isinstance(call, WatchCall | JoinCall) else 3600
        for _ in range(20):
            assert await replica.catalog.resolve("sql") == known
            await asyncio.sleep(0.02)
        with pytest.raises(DirectoryUnavailable):
            await asyncio.wait_for(replica.catalog.resolve("other"), LATE_S)
        replica.directory.slow = lambda _: 0.0


async def test_the_log_is_read_once_for_all_who_ask_together_and_after_they_asked(tmp_path: Path) -> None:
    class Waiting(FolderStore):
        num_reads = 0
        goes_on = threading.Event()

        def keys(self, prefix: str) -> list[str]:
            self.num_reads += 1
            assert self.goes_on.wait(LATE_S)
            return super().keys(prefix)

    position = LogPosition(read_store_id(FolderStore(tmp_path)), 0)
    store = Waiting(tmp_path)
    end = LogEnd(lambda: store, LATE_S)
    asked = [asyncio.create_task(end.changed_since(position)) for _ in range(100)]
    await until(lambda: store.num_reads == 1)
    asked += [asyncio.create_task(end.changed_since(position)) for _ in range(100)]
    await asyncio.sleep(0.01)
    store.goes_on.set()
    assert await asyncio.gather(*asked) == [frozenset()] * 200
    assert store.num_reads == 2
    assert await end.changed_since(LogPosition("", 0)) is None
