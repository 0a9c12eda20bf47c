"""What a deploy with another list of lora_modules does to the names that are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog
from lorafleet.protocol.errors import ModelNotFound
from lorafleet.protocol.names import PAST_ALL
from tests.cluster.directory import conftest
from tests.cluster.directory.conftest import QUICK, Engine, loaded, replica

Make = Callable[[str], str]
make = conftest.make


@asynccontextmanager
async def replicas(tmp_path: Path) -> AsyncIterator[list[DirectoryCatalog]]:
    directory = await loaded(AdapterDirectory(Catalogue(FolderStore(tmp_path / "catalogue")), timing=QUICK))
    async with replica(directory, "r1", Engine()) as one, replica(directory, "r2", Engine()) as two:
        yield [one, two]


async def deploy(replicas: list[DirectoryCatalog], listed: dict[str, str]) -> None:
    """Does what replicas do for a list of lora_modules, one after another."""
    for one in replicas:
        for name, path in listed.items():
            await one.seed(*await one.read_at_start(name, path, None))
        await one._admin.unlist(listed)


async def known(one: DirectoryCatalog) -> list[str]:
    return [lora.lora_name for lora in await one.listed("", PAST_ALL, 100)]


async def test_the_names_are_those_of_the_last_list(make: Make, tmp_path: Path) -> None:
    async with replicas(tmp_path) as both:
        for listed in (["a", "b"], ["a"], ["b", "c"], ["a", "b"], [], ["b"]):
            await deploy(both, {name: make(name) for name in listed})
            for one in both:
                assert await known(one) == listed
                for name in {"a", "b", "c"}.difference(listed):
                    with pytest.raises(ModelNotFound):
                        await one.resolve(name)


async def test_a_name_has_the_bytes_of_the_path_that_is_listed_last_also_if_it_was_listed_before(
    make: Make, tmp_path: Path
) -> None:
    old, new = make("old"), make("new")
    async with replicas(tmp_path) as both:
        for path in (old, new, old):
            await deploy(both, {"a": path})
            assert {(await one.resolve("a")).lora_path for one in both} == {path}


async def test_what_was_pushed_at_run_time_stays_as_it_is(make: Make, tmp_path: Path) -> None:
    async with replicas(tmp_path) as both:
        await deploy(both, {"a": make("a"), "b": make("b")})
        pushed = [await both[0].add(name, make(f"pushed {name}"), load_inplace=True) for name in ("a", "mine")]
        await deploy(both, {"b": make("b")})
        assert await known(both[1]) == ["a", "b", "mine"]
        assert [await both[1].resolve(name) for name in ("a", "mine")] == pushed
        await deploy(both, {"a": make("a"), "b": make("b")})
        assert await both[1].resolve("a") == pushed[0], "its path was not changed"


async def test_what_an_administrator_has_removed_comes_back_only_when_it_is_listed_anew(
    make: Make, tmp_path: Path
) -> None:
    async with replicas(tmp_path) as both:
        await deploy(both, {"a": make("a"), "b": make("b")})
        await both[0].remove("b")
        await deploy(both, {"a": make("a"), "b": make("b"), "c": make("c")})
        assert await known(both[1]) == ["a", "c"]
        await deploy(both, {"a": make("a")})
        await deploy(both, {"a": make("a"), "b": make("b")})
        assert await known(both[1]) == ["a", "b"]


async def test_an_adapter_is_listed_again_while_requests_of_before_still_use_it(make: Make, tmp_path: Path) -> None:
    async with replicas(tmp_path) as both:
        await deploy(both, {"a": make("a")})
        engine = both[0]._engine
        assert isinstance(engine, Engine)
        ended = engine.busy[(await both[0].resolve("a")).digest] = asyncio.Event()
        await deploy(both, {})
        assert await known(both[0]) == []
        await deploy(both, {"a": make("a")})
        assert [await known(one) for one in both] == [["a"], ["a"]]
        ended.set()


async def test_the_list_of_another_application_is_left_alone(make: Make, tmp_path: Path) -> None:
    async with replicas(tmp_path) as both:
        await deploy(both, {"a": make("a")})
        both[1]._admin._application = "other"
        await deploy(both[1:], {"b": make("b")})
        await deploy(both[1:], {})
        assert await known(both[0]) == ["a"]
