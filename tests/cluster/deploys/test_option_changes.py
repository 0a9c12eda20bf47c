"""A running replica takes the options of a deploy, over a real directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorafleet.api.front_config import FrontConfig
from lorafleet.cluster.batches.line_places import LinePlaces
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.config import AppArgs, parse_args
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.serve.option_changes import OptionChanges
from lorafleet.cluster.tenancy.tenancy import Tenancy
from lorafleet.protocol.engine_control import BoundQueue
from lorafleet.protocol.errors import LorafleetError, ModelNotFound
from lorafleet.resolvers.resolver_metrics import ResolverMetrics
from lorafleet.resolvers.store import AdapterStore
from tests.cluster.directory import conftest
from tests.cluster.directory.conftest import QUICK, Engine, loaded, replica

make = conftest.make


class Replica:
    """A replica with its parts, except for a model and HTTP."""

    def __init__(self, catalog: Any, engine: Engine, args: AppArgs) -> None:
        self.catalog = catalog
        self.engine = engine
        self.front: Any = SimpleNamespace(config=FrontConfig(("base",), "/m"))
        self.front.change_config = lambda config: setattr(self.front, "config", config)
        self.batches: Any = SimpleNamespace(places=LinePlaces(args.batch_concurrency))
        self.tenancy = Tenancy(args.admin_key, None, None, None, "r1", None)  # type: ignore[arg-type]  # No limits.
        self.args = args
        admin, membership = catalog._admin, catalog._membership
        store, lookups = AdapterStore(args.sources), ResolverMetrics()
        self.changes = OptionChanges(
            self.front, engine, self.tenancy, catalog, admin, membership, store, lookups, self.batches
        )

    async def deploy(self, **options: Any) -> None:
        args = parse_args({"model": "/m", "admin_key": "a-former-key"} | options)
        await self.changes.check(self.args, args)
        await self.changes.apply(self.args, args)
        self.args = args


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Replica]:
    directory = await loaded(AdapterDirectory(Catalogue(FolderStore(tmp_path / "catalogue")), timing=QUICK))
    engine = Engine()
    async with replica(directory, "r1", engine) as catalog:
        yield Replica(catalog, engine, parse_args({"model": "/m", "admin_key": "a-former-key"}))


async def test_adapters_are_those_of_the_last_deploy(one: Replica, make: Callable[[str], str]) -> None:
    await one.deploy(lora_modules=[f"a={make('a')}", f"b={make('b')}"])
    await one.deploy(lora_modules=[f"a={make('other')}", f"c={make('c')}"])
    assert (await one.catalog.resolve("a")).lora_path == make("other")
    assert await one.catalog.resolve("c")
    with pytest.raises(ModelNotFound):
        await one.catalog.resolve("b")
    assert one.engine.reads.count(make("a")) == 2, "once to check it, and once to serve it"


async def test_an_adapter_that_cannot_be_loaded_changes_nothing(one: Replica, make: Callable[[str], str]) -> None:
    await one.deploy(lora_modules=[f"a={make('a')}"])
    with pytest.raises(LorafleetError, match="adapter 'b' cannot be served"):
        await one.deploy(lora_modules=[f"b={make('bad')}"], max_queued_requests=3)
    assert await one.catalog.resolve("a")
    assert one.engine.controls == []


async def test_bounds_keys_and_origins_are_taken(one: Replica) -> None:
    await one.deploy(
        admin_key="a-later-key",
        allowed_origins=["https://app.example.org"],
        batch_concurrency=3,
        max_body_bytes=1000,
        max_queued_requests=7,
        push_hosts=["10.0.0.1"],
        queue_timeout=2.5,
    )
    config = one.front.config
    assert (config.max_body_bytes, config.queue_timeout_s) == (1000, 2.5)
    assert config.origins.allowed == ("https://app.example.org",)
    assert one.engine.controls == [BoundQueue(7, one.args.max_queued_tokens)]
    assert one.tenancy.gate.caller("a-later-key", "admin").is_operator
    assert one.batches.places.most == 3
    assert one.catalog._admin.receivers.groups.allowed_hosts == ["10.0.0.1"]


async def test_names_are_looked_up_by_the_resolvers_of_the_last_deploy(one: Replica, tmp_path: Path) -> None:
    folder = tmp_path / "resolved"
    (folder / "found").mkdir(parents=True)
    (folder / "found" / "adapter_config.json").write_text('{"base_model_name_or_path": "/m"}')
    (folder / "found" / "adapter_model.safetensors").write_text("found")
    with pytest.raises(ModelNotFound):
        await one.catalog.resolve("found")
    await one.deploy(lora_resolver_dir=str(folder))
    assert await one.catalog.resolve("found")


async def test_fewer_lines_of_batches_fly_once_those_in_flight_have_ended() -> None:
    places, done = LinePlaces(2), asyncio.Event()
    flying = 0

    async def line() -> None:
        nonlocal flying
        async with places:
            flying += 1
            await done.wait()
            done.clear()
            flying -= 1

    lines = [asyncio.create_task(line()) for _ in range(4)]
    await asyncio.sleep(0)
    assert flying == 2
    places.set_most(1)
    for _ in lines:
        done.set()
        for _ in range(10):
            await asyncio.sleep(0)
    await asyncio.gather(*lines)
    places.set_most(3)
    lines = [asyncio.create_task(line()) for _ in range(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert flying == 3
    for task in lines:
        task.cancel()
