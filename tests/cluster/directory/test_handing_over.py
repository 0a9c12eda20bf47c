"""Which replicas hold an adapter: what routers hear of it, and what the directory orders to be read at a second home,
ahead of requests, and elsewhere before a replica leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from tests.cluster.directory.conftest import QUICK, Engine, Make, full_report, loaded, replica, until


async def test_routers_hear_who_holds_what_a_name_stands_for(catalogue: Catalogue, make: Make) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    async with replica(directory, "r1", Engine()) as one, replica(directory, "r2", Engine()):
        digest = (await one.add("sql", make("x"), load_inplace=False)).digest
        routes = await directory.routers.routes("", -1)
        waiting = asyncio.create_task(directory.routers.routes(routes.epoch, routes.version))
        await asyncio.sleep(0)
        assert directory.routers.accept(full_report("r1", {digest: "gpu"}))
        told = await waiting
        assert (told.full, told.tiers, told.names) == (False, [("r1", digest, "gpu")], {"sql": (digest,)})
        directory.replicas.forget("r1")
        left = await directory.routers.routes(told.epoch, told.version)
        assert (left.tiers, left.loads, left.names) == ([("r1", digest, None)], {"r1": None}, {"sql": ()})
        assert not directory.routers.accept(full_report("r1", {digest: "gpu"})), "a report that was under way"


async def test_a_replica_is_ordered_to_read_an_adapter_that_needs_it_as_a_second_home(
    catalogue: Catalogue, make: Make
) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    first, second = Engine(), Engine()
    async with replica(directory, "r1", first) as one, replica(directory, "r2", second):
        hot = (await one.add("hot", make("x"), load_inplace=False)).digest
        read = len(second.reads)
        directory.routers.accept(full_report("r1", {hot: "gpu"}, {hot: 100_000}))
        directory.routers.accept(full_report("r2", {}))
        await directory.placement.place()
        await until(lambda: len(second.reads) > read)
        assert len(second.reads) == read + 1
        placed = (await directory.routers.routes("", -1)).placed[hot]
        assert placed.homes == ("r1", "r2")


async def test_what_only_a_leaving_replica_holds_of_what_is_asked_for_is_read_elsewhere_before_it_goes(
    catalogue: Catalogue, make: Make
) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    engines = {name: Engine() for name in ("r1", "r2", "r3")}
    async with (
        replica(directory, "r1", engines["r1"]) as one,
        replica(directory, "r2", engines["r2"]),
        replica(directory, "r3", engines["r3"]),
    ):
        names = ["lone", "shared", "cold", *(f"busy{i}" for i in range(12))]
        lone, shared, cold, *busy = [(await one.add(name, make(name), load_inplace=False)).digest for name in names]
        everywhere = dict.fromkeys(busy, "gpu")
        asked = dict.fromkeys([lone, shared, *busy], 100)
        directory.routers.accept(full_report("r1", {lone: "gpu", shared: "gpu", cold: "cpu", **everywhere}, asked))
        directory.routers.accept(full_report("r2", {shared: "cpu", **everywhere}))
        directory.routers.accept(full_report("r3", everywhere))
        await directory.placement.place()
        for engine in engines.values():
            engine.reads.clear()
        await asyncio.gather(directory.placement.drain("r1"), directory.placement.drain("r1"))
        assert [Path(read).name for read in engines["r2"].reads + engines["r3"].reads] == [lone]
        assert engines["r1"].reads == []
        [home] = (await directory.routers.routes("", -1)).placed[lone].homes
        assert engines[home].reads, "it is read where requests will be sent"


async def test_a_leaving_replica_is_given_nothing_more_but_one_that_was_not_stopped_is(
    catalogue: Catalogue,
) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=replace(QUICK, forget_s=0.5)))
    async with replica(directory, "r1", Engine()), replica(directory, "r2", Engine()):
        await directory.placement.drain("r1")
        assert directory.replicas.ready() == ["r2"]
        directory.tick()
        assert directory.replicas.ready() == ["r2"]
        await asyncio.sleep(0.6)
        directory.tick()
        assert directory.replicas.ready() == ["r1", "r2"]


async def test_handing_over_is_bounded_in_time_and_by_the_room_of_those_that_stay(
    catalogue: Catalogue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=replace(QUICK, hand_over_s=1.0)))
    slow = Engine()
    async with replica(directory, "r1", Engine()) as one, replica(directory, "r2", slow):
        digests = [(await one.add(f"t{i}", make(f"t{i}"), load_inplace=False)).digest for i in range(12)]
        tokens = {digest: 1000 - i for i, digest in enumerate(digests)}
        directory.routers.accept(full_report("r1", dict.fromkeys(digests, "cpu"), tokens))
        directory.routers.accept(full_report("r2", {}))
        slow.reads.clear()
        stuck = asyncio.Event()

        async def load_adapter(lora: LoRARequest) -> AdapterInfo:
            slow.reads.append(lora.lora_path)
            await stuck.wait()
            return AdapterInfo(lora.digest, 8, 1, [])

        monkeypatch.setattr(slow, "load_adapter", load_adapter)
        await asyncio.wait_for(directory.placement.drain("r1"), 60)
        assert [Path(read).name for read in slow.reads] == digests[:6], "the hottest, into four fifths of eight places"
        stuck.set()


async def test_the_last_replica_goes_at_once(catalogue: Catalogue, make: Make) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    async with replica(directory, "r1", Engine()) as one:
        digest = (await one.add("x", make("x"), load_inplace=False)).digest
        directory.routers.accept(full_report("r1", {digest: "gpu"}, {digest: 1000}))
        await asyncio.wait_for(directory.placement.drain("r1"), 60)
        await asyncio.wait_for(directory.placement.drain("nobody"), 60)


@pytest.mark.parametrize("fill_cpu_loras", [True, False])
async def test_what_nobody_has_asked_for_is_read_ahead_where_that_is_switched_on(
    catalogue: Catalogue, make: Make, fill_cpu_loras: bool
) -> None:
    directory, engine = await loaded(AdapterDirectory(catalogue, fill_cpu_loras=fill_cpu_loras, timing=QUICK)), Engine()
    async with replica(directory, "r1", Engine()) as one:
        await one.add("sql", make("x"), load_inplace=False)
    async with replica(directory, "r2", engine):
        directory.routers.accept(full_report("r2", {}))
        for _ in range(3):
            await directory.placement.place()
        await until(lambda: len(engine.reads) >= fill_cpu_loras)
        await asyncio.sleep(0.05)
        assert len(engine.reads) == fill_cpu_loras
        assert directory.counts().reads_ahead == fill_cpu_loras
