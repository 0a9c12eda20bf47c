"""The directory, the replicas' copies of it and the catalogue below it, in one event loop and without Ray."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType

import pytest

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.directory import adapter_names
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_messages import StaleEpoch
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.errors import AdapterExists, AdapterMissing, InvalidAdapterName, ModelNotFound
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.names import PAST_ALL
from tests.cluster.directory.conftest import QUICK, Engine, Make, loaded, replica, until


async def test_a_write_is_known_everywhere_when_it_returns(catalogue: Catalogue, make: Make) -> None:
    directory, old, new = (
        await loaded(AdapterDirectory(catalogue, timing=QUICK)),
        folder_digest(Path(make("old"))),
        folder_digest(Path(make("new"))),
    )
    async with replica(directory, "r1", Engine()) as one, replica(directory, "r2", Engine()) as two:
        await one.add("sql", make("old"), load_inplace=False)
        assert (await two.resolve("sql")).digest == old
        await two.add("sql", make("new"), load_inplace=True)
        assert (await one.resolve("sql")).digest == new
        await one.remove("sql")
        assert await two.listed("", PAST_ALL, 1000) == []
        with pytest.raises(ModelNotFound):
            await two.resolve("sql")


async def test_nothing_is_kept_of_names_that_were_used_once(catalogue: Catalogue, make: Make) -> None:
    engine = Engine()
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    async with replica(directory, "r1", engine) as one, replica(directory, "r2", engine) as two:
        digest = (await one.add("used-once", make("x"), load_inplace=False)).digest
        assert (await two.resolve("used-once")).digest == digest
        await directory.routers.routes("", -1)
        await one.remove("used-once")
        engine.held.clear()  # as nobody reports it, it is not told to
        await until(  # its files are removed in the background
            lambda: not any({"used-once", digest} & set(held) for held in containers(directory, one, two))
        )


def containers(*roots: object) -> Iterator[dict[object, object] | set[object]]:
    """Every dict and set that can be reached, but for the interpreter's own things."""
    seen, queue = set[int](), [*roots]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | FrameType | asyncio.Handle):
            continue
        seen.add(id(one))
        if type(one) in (dict, set):
            yield one  # type: ignore[misc]
        queue += gc.get_referents(one)


async def test_a_name_is_taken_once(catalogue: Catalogue, make: Make) -> None:
    directory, path = await loaded(AdapterDirectory(catalogue, timing=QUICK)), make("x")
    async with replica(directory, "r1", Engine()) as one, replica(directory, "r2", Engine()) as two:
        results = await asyncio.gather(
            *(c.add("sql", path, load_inplace=False) for c in (one, two, one)), return_exceptions=True
        )
        assert [type(r) for r in results].count(AdapterExists) == 2, results


async def test_bad_files_and_names_register_nothing(catalogue: Catalogue, make: Make, tmp_path: Path) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    async with replica(directory, "r1", Engine()) as one:
        for path in (str(tmp_path / "nowhere"), make("bad")):
            with pytest.raises(AdapterMissing):
                await one.add("sql", path, load_inplace=False)
        for name in ("", "../x", "a\nb", "base"):
            with pytest.raises(InvalidAdapterName):
                await one.add(name, make("x"), load_inplace=False)
        assert await one.listed("", PAST_ALL, 1000) == []
        assert list((tmp_path / "catalogue").glob("adapters/*")) == []


async def test_a_name_that_changes_again_and_again_does_not_leave_replicas_behind(
    catalogue: Catalogue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_names, "MAX_CHANGES", 3)
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    joined = directory.leases.join("r1", "", [], [], True)

    async def come_and_go(name: str) -> None:
        await directory.names.record_found(joined.epoch, LoRARequest(name, 1, make(name), "d"))
        assert directory.names.forget_found(name)

    for _ in range(10):
        for name in ("a", "b", "c"):
            await come_and_go(name)
    changes = await directory.leases.watch("r1", joined.epoch, joined.version, 0)
    assert changes.served == {"a": None, "b": None, "c": None}
    await come_and_go("d")
    with pytest.raises(StaleEpoch):
        await directory.leases.watch("r1", joined.epoch, joined.version, 0)
    assert list((await directory.leases.watch("r1", joined.epoch, changes.version, 0)).served) == ["d"]


async def test_an_adapter_from_the_start_does_not_undo_what_was_done_since(catalogue: Catalogue, make: Make) -> None:
    directory = await loaded(AdapterDirectory(catalogue, timing=QUICK))
    async with replica(directory, "r1", Engine()) as one:
        await one.seed(*await one.read_at_start("sql", make("old"), None))
        await one.seed(*await one.read_at_start("gone", make("old"), None))
        added = await one.add("sql", make("new"), load_inplace=True)
        await one.remove("gone")
        async with replica(directory, "r2", Engine()) as two:
            assert await two.seed(*await two.read_at_start("sql", make("old"), None)) == added
            assert await two.seed(*await two.read_at_start("gone", make("old"), None)) is None
