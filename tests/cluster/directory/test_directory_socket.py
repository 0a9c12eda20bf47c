"""The directory over its own TCP connections, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from ipv6 import needs_ipv6
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory import directory_socket as socket_module
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_calls import (
    JoinCall,
    LeaveCall,
    NeighborsCall,
    ReportCall,
    RoutesCall,
    WatchCall,
)
from lorafleet.cluster.directory.directory_messages import Changes, StaleEpoch
from lorafleet.cluster.directory.directory_socket import DirectoryConnection, DirectoryServer
from lorafleet.cluster.directory.neighbors import Neighbor
from lorafleet.cluster.directory.residency import Report
from lorafleet.cluster.routing.routing import ReplicaLoad
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.resolvers.neighbor_wire import NeighborAddress
from tests.cluster.directory.conftest import loaded

LOCALHOST = "127.0.0.1"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[DirectoryServer]:
    directory = await loaded(AdapterDirectory(Catalogue(FolderStore(tmp_path))))
    serving = DirectoryServer(directory, LOCALHOST, str(tmp_path), "secret")
    await serving.start()
    await asyncio.sleep(0.01)  # routers are told that it is loaded
    yield serving
    await stopped(serving)


async def stopped(server: DirectoryServer) -> None:
    server.stop()
    await asyncio.sleep(0.01)  # until the transports have noticed


def report_call(sequence: int, full: bool = False, **tiers: str | None) -> ReportCall:
    report = msgspec.convert(
        {
            "replica_id": "r1",
            "sequence": sequence,
            "full": full,
            "tiers": tiers,
            "load": msgspec.to_builtins(ReplicaLoad()),
        },
        Report,
    )
    return ReportCall(report)


async def test_a_report_becomes_the_answer_of_a_poll_that_waits(server: DirectoryServer) -> None:
    replica, router = await DirectoryConnection.open(server.address), await DirectoryConnection.open(server.address)
    assert not await replica.ask(report_call(1, full=True)), "who has not joined is not known"
    await replica.ask(JoinCall("r1", "", [], [], True))
    assert await replica.ask(report_call(1, full=True, x="gpu"))
    table = await router.ask(RoutesCall("", -1))
    assert (table.full, table.tiers) == (True, [("r1", "x", "gpu")])
    table = await router.ask(RoutesCall(table.epoch, table.version))  # what was on its way to be told
    waiting = asyncio.create_task(router.ask(RoutesCall(table.epoch, table.version)))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert await replica.ask(report_call(2, x=None, y="cpu"))
    assert sorted((await waiting).tiers) == [("r1", "x", None), ("r1", "y", "cpu")]


async def test_a_replica_that_joins_says_where_it_sends_adapters_to_other_nodes(server: DirectoryServer) -> None:
    directory = server.directory
    for name in ("r1", "r2"):
        connection = await DirectoryConnection.open(server.address)
        neighbor = Neighbor(f"node of {name}", NeighborAddress(name, 20_000, "secret"))
        await connection.ask(JoinCall(name, "", [], [], True, neighbor))
    assert await connection.ask(ReportCall(Report("r2", 1, True, {"x": "gpu"}, ReplicaLoad())))
    assert await directory.ask(NeighborsCall("r1", "x")) == [neighbor.address]
    await directory.ask(LeaveCall("r2"))
    assert await directory.ask(NeighborsCall("r1", "x")) == []


@needs_ipv6
async def test_a_directory_on_a_node_with_an_address_of_ipv6_is_reached(tmp_path: Path) -> None:
    directory = await loaded(AdapterDirectory(Catalogue(FolderStore(tmp_path))))
    server = DirectoryServer(directory, "::1", str(tmp_path), "secret")
    await server.start()
    connection = await DirectoryConnection.open(server.address)
    assert (await connection.ask(RoutesCall("", -1))).full
    connection.close()
    await stopped(server)


async def test_calls_wait_side_by_side_and_hear_of_names_and_of_another_epoch(server: DirectoryServer) -> None:
    directory = server.directory
    joined = directory.leases.join("r1", "", [], [], ready=True)
    connection = await DirectoryConnection.open(server.address)
    table = await connection.ask(RoutesCall("", -1))
    polls = [asyncio.create_task(connection.ask(RoutesCall(table.epoch, table.version))) for _ in range(3)]
    watch = asyncio.create_task(connection.ask(WatchCall("r1", joined.epoch, joined.version, 0)))
    await asyncio.sleep(0.02)
    found = await directory.names.record_found(joined.epoch, LoRARequest("sql", 1, "/sql", "digest"))
    changes = await watch
    assert changes == Changes(joined.epoch, found.version, {"sql": found.served}, log=joined.log)
    assert [one.version for one in await asyncio.gather(*polls)] == [table.version + 1] * 3
    with pytest.raises(StaleEpoch, match="before"):
        await connection.ask(WatchCall("r1", "before", 0, 0))


async def test_a_stranger_can_make_the_directory_keep_a_few_hundred_bytes_and_for_a_while_only(tmp_path: Path) -> None:
    directory = await loaded(AdapterDirectory(Catalogue(FolderStore(tmp_path))))
    server = DirectoryServer(directory, LOCALHOST, str(tmp_path), "secret", hello_s=1.0)
    await server.start()
    reader, writer = await asyncio.open_connection(LOCALHOST, server.address.port)
    writer.write((60 << 20).to_bytes(4, "little") + bytes(1 << 20))  # announces 60 MiB
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    silent, its_writer = await asyncio.open_connection(LOCALHOST, server.address.port)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(silent.read(), 60) == b"", "it took too long to show the secret"
    its_writer.close()
    assert server.num_strangers == 0
    friend = await DirectoryConnection.open(server.address)
    assert (await friend.ask(RoutesCall("", -1))).full
    await asyncio.sleep(1.2)
    assert (await friend.ask(RoutesCall("", -1))).full, "who has shown it stays"
    friend.close()
    await stopped(server)


async def test_more_strangers_than_are_allowed_are_cut_off(
    server: DirectoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_module, "MAX_STRANGERS", 2)
    strangers = [await asyncio.open_connection(LOCALHOST, server.address.port) for _ in range(5)]
    deadline = asyncio.get_running_loop().time() + 60
    while server.num_strangers != 2:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    for _, writer in strangers:
        writer.close()


async def test_who_does_not_know_the_secret_or_sends_rubbish_is_cut_off(server: DirectoryServer) -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    for guess in ("guessed", "gue\u00dfed", ""):
        stranger = await DirectoryConnection.open(msgspec.structs.replace(server.address, secret=guess))
        with pytest.raises(ConnectionResetError):
            await stranger.ask(RoutesCall("", -1))
    assert not faults
    connection = await DirectoryConnection.open(server.address)
    connection._transport.write(b"\x03\0\0\0abc")
    with pytest.raises(ConnectionResetError):
        await connection.ask(RoutesCall("", -1))
    friend = await DirectoryConnection.open(server.address)
    assert (await friend.ask(RoutesCall("", -1))).full


async def test_calls_end_when_the_directory_goes(server: DirectoryServer) -> None:
    connection = await DirectoryConnection.open(server.address)
    table = await connection.ask(RoutesCall("", -1))
    waiting = asyncio.create_task(connection.ask(RoutesCall(table.epoch, table.version)))
    await asyncio.sleep(0.02)
    await stopped(server)
    with pytest.raises(ConnectionResetError):
        await waiting
    assert connection.closed
    with pytest.raises(ConnectionResetError):
        await connection.ask(report_call(1))
    with pytest.raises(ConnectionRefusedError):
        await DirectoryConnection.open(server.address)


async def test_a_directory_that_is_silent_has_gone(server: DirectoryServer) -> None:
    connection = await DirectoryConnection.open(server.address, answer_s=0.05)
    table = await connection.ask(RoutesCall("", -1))
    with pytest.raises(ConnectionAbortedError, match="silent"):
        await connection.ask(RoutesCall(table.epoch, table.version))
    assert connection.closed


async def test_the_next_process_of_a_directory_has_its_address_unless_somebody_took_it(tmp_path: Path) -> None:
    directory = AdapterDirectory(Catalogue(FolderStore(tmp_path)))
    first = DirectoryServer(directory, LOCALHOST, "one", "secret")
    beside = DirectoryServer(directory, LOCALHOST, "one", "secret")
    assert beside.address != first.address
    first.stop()
    beside.stop()
    second = DirectoryServer(directory, LOCALHOST, "one", "secret")
    assert second.address == first.address
    second.stop()
