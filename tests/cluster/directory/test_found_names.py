"""Names that resolvers find: one search for all who ask, bounds, and tenants that do not delay each other."""

from __future__ import annotations

import asyncio

import pytest

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.directory import adapter_names
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.serve.adapter_lookup import SEARCHES
from lorafleet.protocol.errors import ModelNotFound, QueueFull
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.names import full_name, tenant_of
from tests.cluster.directory.conftest import QUICK, Engine, Folder, Make, loaded, replica


async def test_concurrent_requests_share_one_resolution_and_misses_are_remembered(
    catalogue: Catalogue, make: Make
) -> None:
    directory, engine, folder = await loaded(AdapterDirectory(catalogue, timing=QUICK)), Engine(), Folder(make, "cold")
    async with replica(directory, "r1", engine, folder) as one, replica(directory, "r2", engine, folder) as two:
        found = await asyncio.gather(*(one.resolve("cold") for _ in range(10)))
        assert len({e.digest for e in found}) == 1
        assert (folder.asked, engine.reads) == (["cold"], [make("cold")])
        assert (await two.resolve("cold")).digest == found[0].digest
        for _ in range(3):
            with pytest.raises(ModelNotFound):
                await one.resolve("nobody")
        assert folder.asked == ["cold", "nobody"]


async def test_one_tenant_s_names_at_a_slow_source_leave_room_to_look_for_another_s(
    catalogue: Catalogue, make: Make
) -> None:
    released = asyncio.Event()

    class Slow(Folder):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            if lora_name.startswith("slow"):
                await released.wait()
            return await super().resolve_lora(base_model_name, lora_name)

    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    async with replica(directory, "r1", Engine(), Slow(make, "quick")) as one:
        num_loud = SEARCHES.running_of_one + SEARCHES.waiting + 2
        loud = [asyncio.create_task(one.resolve(f"slow-{i}", None, "loud")) for i in range(num_loud)]
        assert (await one.resolve("quick", None, "quiet")).lora_name == "quick"
        refused = [task for task in loud if task.done()]
        assert len(refused) == 2 and all(isinstance(task.exception(), QueueFull) for task in refused)
        released.set()
        ended = await asyncio.gather(*loud, return_exceptions=True)
    assert sum(isinstance(one, ModelNotFound) for one in ended) == num_loud - 2


async def test_one_tenant_s_loads_from_a_slow_source_leave_room_to_look_for_another_s_names(
    catalogue: Catalogue, make: Make
) -> None:
    released = asyncio.Event()

    class Slow(Engine):
        async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
            if tenant_of(lora.lora_name) == "loud":
                await released.wait()
            return await super().load_adapter(lora)

    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    async with replica(directory, "r1", Slow(), Folder(make, "quick")) as one:
        loud = [
            asyncio.create_task(one.add(full_name("loud", f"a{i}"), make("a"), load_inplace=False))
            for i in range(SEARCHES.running + 4)
        ]
        assert (await one.resolve("quick", None, "tenant quiet")).lora_name == "quick"
        assert not any(task.done() for task in loud)
        released.set()
        assert len(await asyncio.gather(*loud)) == SEARCHES.running + 4


async def test_what_resolvers_found_is_remembered_in_bounds_and_found_again(
    catalogue: Catalogue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_names, "MAX_FOUND", 3)
    names = [f"cold{number}" for number in range(5)]
    directory, folder = await loaded(AdapterDirectory(catalogue, timing=QUICK)), Folder(make, *names)
    async with replica(directory, "r1", Engine(), folder) as one:
        first = [await one.resolve(name) for name in names]
        assert list(directory.names.found.by_name) == names[2:]
        assert len(directory.names.found) == 3
        assert [await one.resolve(name) for name in names] == first
