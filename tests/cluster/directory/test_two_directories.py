"""Two directories over one store, each with a replica: what one writes is soon served, moved or gone at the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.catalogue.catalogue import Catalogue, keep_reading
from lorafleet.cluster.catalogue.catalogue_records import Share
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.admin_verbs import PushTerms, RegisterAdapter
from lorafleet.protocol.errors import ModelNotFound, Overloaded
from tests.cluster.admin.test_administration import PATIENT
from tests.cluster.directory import conftest
from tests.cluster.directory.conftest import Engine, Make, loaded, replica

make = conftest.make
DEADLINE_S = 60.0


@dataclass
class Server:
    directory: AdapterDirectory
    admin: Administration
    view: DirectoryCatalog
    engine: Engine

    async def push(self, name: str, path: str) -> str:
        digest = folder_digest(Path(path))
        await asyncio.to_thread(self.directory.catalogue.store.put_files, digest, Path(path))
        await self.admin.push(RegisterAdapter(name, digest, PushTerms(path)))
        return digest

    async def served(self, name: str) -> str | None:
        try:
            return (await self.view.resolve(name)).digest
        except ModelNotFound:
            return None

    async def until_served(self, name: str, digest: str | None) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while await self.served(name) != digest:
            assert time.monotonic() < deadline, f"{name} is still not {digest}"
            await asyncio.sleep(0.01)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    directory = await loaded(AdapterDirectory(Catalogue(FolderStore(folder)), timing=PATIENT))
    reading = asyncio.get_running_loop().create_task(keep_reading(directory.catalogue, 0.05))
    engine = Engine()
    async with replica(directory, "r0", engine) as view:
        await directory.replicas.wait_for_ready(1)
        yield Server(directory, Administration(directory, ["base"]), view, engine)
    reading.cancel()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[tuple[Server, Server]]:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(serving(tmp_path / "catalogue")) for _ in range(2)]
        yield first, second


async def test_what_one_pushes_moves_and_removes_follows_at_the_other(
    servers: tuple[Server, Server], make: Make
) -> None:
    one, two = servers
    x = await one.push("sql", make("x"))
    await two.until_served("sql", x)
    y = await one.push("sql", make("y"))
    await two.until_served("sql", y)
    await one.admin.alias("sql", [Share(1, 1.0)], "sql-stable")
    await two.until_served("sql-stable", x)
    await one.admin.rollback("sql")
    await two.until_served("sql", x)
    await two.admin.prefetch("sql", 1)
    await one.admin.remove("sql", wait_s=DEADLINE_S)
    await two.until_served("sql", None)
    await two.until_served("sql-stable", None)
    await two.until(lambda: not two.engine.held)
    assert one.directory.catalogue.store.stored_digests() == []


async def test_pins_follow_at_the_other(servers: tuple[Server, Server], make: Make) -> None:
    one, two = servers
    x = await one.push("sql", make("x"))
    await one.admin.pin("sql", 1)
    await two.until(lambda: two.engine.pinned == {x})
    await one.admin.unpin("sql")
    await two.until(lambda: not two.engine.pinned)


async def test_both_write_at_once_and_no_change_is_lost(servers: tuple[Server, Server], make: Make) -> None:
    one, two = servers
    await one.push("sql", make("x"))

    async def name_it(server: Server, prefix: str) -> None:
        for number in range(10):
            await server.admin.alias("sql", [Share(1, 1.0)], f"{prefix}{number}")

    await two.until_served("sql", folder_digest(Path(make("x"))))
    await asyncio.gather(name_it(one, "first"), name_it(two, "second"))
    wanted = {"sql", *(f"{prefix}{number}" for prefix in ("first", "second") for number in range(10))}
    for server in servers:
        await server.until(
            lambda server=server: set(server.directory.catalogue.state.adapters["sql"].aliases) == wanted
        )


async def test_a_push_into_what_the_other_removes_is_refused_and_not_lost(
    servers: tuple[Server, Server], make: Make
) -> None:
    one, two = servers
    x = await one.push("sql", make("x"))
    await two.until_served("sql", x)
    one.engine.busy[x] = asyncio.Event()
    await one.admin.remove("sql", wait_s=0)
    with pytest.raises(Overloaded, match="is being removed by another server"):
        await two.push("sql", make("y"))
    one.engine.busy.pop(x).set()
    await two.until(lambda: "sql" not in two.directory.catalogue.state.adapters)
    await one.until_served("sql", None)
    y = await two.push("sql", make("y"))
    await one.until_served("sql", y)
