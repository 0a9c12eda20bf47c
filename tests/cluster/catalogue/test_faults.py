"""Whatever fails at whichever step of a change, the catalogue stays consistent: each version in force has its files,
what was acknowledged is there, and what was not is there wholly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.catalogue import stored_files as stored_files_module
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Share
from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.s3_store import S3Store
from lorafleet.cluster.catalogue.steady_clock import SteadyClock
from lorafleet.cluster.catalogue.stored_files import StoredFiles
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.admin_verbs import PushTerms, RegisterAdapter
from lorafleet.protocol.errors import AdapterMissing, LorafleetError, OutcomeUnknown, StoreError
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from memory_s3 import MemoryS3, lost_answer
from tests.cluster.directory import conftest
from tests.cluster.directory.conftest import QUICK, Engine, Make, loaded, replica

make = conftest.make

MakeStore = Callable[["Faults"], Store]


class Faults:
    """Counts the points at which a store can fail, before and behind each operation, and fails at some of them."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.num_points = 0
        self.fails: Callable[[int], bool] = lambda _: False
        self._error = error

    def __call__(self) -> None:
        self.num_points += 1
        if self.fails(self.num_points):
            raise self._error()


class FaultyFolder(FolderStore):
    def __init__(self, root: Path, faults: Faults) -> None:
        super().__init__(root)
        self._faults = faults

    def _around(self, work: Callable[[], Any]) -> Any:
        self._faults()
        done = work()
        self._faults()
        return done

    def create(self, key: str, content: bytes) -> bool:
        return bool(self._around(lambda: super(FaultyFolder, self).create(key, content)))

    def read(self, key: str) -> bytes | None:
        content: bytes | None = self._around(lambda: super(FaultyFolder, self).read(key))
        return content

    def keys(self, prefix: str) -> list[str]:
        return list(self._around(lambda: super(FaultyFolder, self).keys(prefix)))

    def delete(self, key: str) -> None:
        self._around(lambda: super(FaultyFolder, self).delete(key))

    def put_files(self, digest: str, folder: Path) -> None:
        self._around(lambda: super(FaultyFolder, self).put_files(digest, folder))

    def has_files(self, digest: str) -> bool:
        return bool(self._around(lambda: super(FaultyFolder, self).has_files(digest)))

    def delete_files(self, digest: str) -> None:
        self._around(lambda: super(FaultyFolder, self).delete_files(digest))


@pytest.fixture(params=["folder", "s3"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], tuple[Faults, Store]]:
    """Makes an empty store and the faults that it can have."""
    made = 0

    def new() -> tuple[Faults, Store]:
        nonlocal made
        made += 1
        if request.param == "s3":
            faults = Faults(lost_answer)
            server = MemoryS3(faults)
            return faults, S3Store("s3://bucket/catalogue", lambda: server)
        faults = Faults(lambda: StoreError("the disk does not answer"))
        return faults, FaultyFolder(tmp_path / f"catalogue{made}", faults)

    return new


class Reader(Engine):
    """A replica's engine that takes every adapter, without reading it."""

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        return AdapterInfo(lora.digest, 8, 1, ["q_proj"])


class Server:
    """One directory with one replica; `acknowledged` are the adapters as the last change of each left them."""

    def __init__(self, store: Store, directory: AdapterDirectory, make: Make) -> None:
        self.store, self.directory, self.make = store, directory, make
        self.admin = Administration(directory, ["base"])

    async def push(self, name: str, weights: str) -> AdapterRecord:
        digest = folder_digest(Path(self.make(weights)))
        await asyncio.to_thread(self.store.put_files, digest, Path(self.make(weights)))
        return await self.admin.push(RegisterAdapter(name, digest, PushTerms("here")))


@asynccontextmanager
async def serving(store: Store, make: Make, settle_s: float = 0.05) -> AsyncIterator[Server]:
    directory = await loaded(AdapterDirectory(Catalogue(store, settle_s), timing=QUICK))
    async with replica(directory, "r0", Reader()):
        await directory.replicas.wait_for_ready(1)
        yield Server(store, directory, make)


async def read_afresh(store: Store) -> dict[str, AdapterRecord]:
    catalogue = Catalogue(store)
    await catalogue.load()
    return dict(catalogue.state.adapters)


def check_files(store: Store, adapters: dict[str, AdapterRecord], folder: Path) -> None:
    """Each version in force has all its files, with their digest."""
    for adapter in adapters.values():
        for version in [] if adapter.removing else adapter.versions:
            copy = folder / "copies" / version.digest
            copy.mkdir(parents=True, exist_ok=True)
            store.fetch_files(version.digest, copy)
            assert folder_digest(copy) == version.digest


async def test_a_push_that_was_written_and_reported_as_failed_is_in_force_with_its_files(
    stores: Callable[[], tuple[Faults, Store]], make: Make, tmp_path: Path
) -> None:
    faults, store = stores()
    async with serving(store, make) as server:
        await server.push("sql", "x")
        written = store.create

        def done_and_lost(key: str, content: bytes) -> bool:
            done = written(key, content)
            if key.startswith("log/"):
                faults.fails = lambda _: True  # and nothing is answered from then on
                raise StoreError("no answer")
            return done

        store.create = done_and_lost  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown, match="may have been made: check"):
            await server.push("sql", "y")
        faults.fails = lambda _: False
        store.create = written  # type: ignore[method-assign]
        await server.directory.catalogue.read_on()
        adapter = await server.admin.show("sql")
        assert [version.digest for version in adapter.versions] == [
            folder_digest(Path(make(weights))) for weights in "xy"
        ]
        assert await read_afresh(store) == {"sql": adapter}
        check_files(store, {"sql": adapter}, tmp_path)
        await server.admin.alias("sql", [Share(2, 1.0)], "next")


async def test_a_list_that_fails_once_does_not_fail_the_push(
    stores: Callable[[], tuple[Faults, Store]], make: Make, tmp_path: Path
) -> None:
    _, store = stores()
    async with serving(store, make) as server:
        await server.push("sql", "x")
        listed, failures = store.keys, iter([True])

        def keys(prefix: str) -> list[str]:
            if prefix == "runs/" and next(failures, False):
                raise StoreError("no answer")
            return listed(prefix)

        store.keys = keys  # type: ignore[method-assign]
        assert len((await server.push("sql", "y")).versions) == 2
        check_files(store, await read_afresh(store), tmp_path)


STEPS: list[Callable[[Server], Awaitable[Any]]] = [
    lambda server: server.push("a", "x"),
    lambda server: server.push("a", "y"),
    lambda server: server.push("b", "x"),
    lambda server: server.admin.alias("a", [Share(1, 1.0)], "a-stable"),
    lambda server: server.admin.remove("b", wait_s=60),
    lambda server: server.push("c", "z"),
    lambda server: server.admin.remove("c", wait_s=60),
]


async def run(store: Store, make: Make) -> list[bool]:
    """Which of the steps were acknowledged."""
    acknowledged = []
    async with serving(store, make) as server:
        for step in STEPS:
            try:
                await step(server)
                acknowledged.append(True)
            except LorafleetError:
                acknowledged.append(False)
    return acknowledged


def check_outcome(adapters: dict[str, AdapterRecord], acknowledged: list[bool], digests: dict[str, str]) -> None:
    first, second, _, alias, without_b, _, without_c = acknowledged
    versions = {name: {one.digest for one in adapter.versions} for name, adapter in adapters.items()}
    in_force = {name for name, adapter in adapters.items() if not adapter.removing}
    for is_there, digest in ((first, digests["x"]), (second, digests["y"])):
        assert not is_there or digest in versions["a"]
    assert not alias or "a-stable" in adapters["a"].aliases
    assert not (without_b and "b" in in_force) and not (without_c and "c" in in_force)
    assert all(adapter.aliases or adapter.removing for adapter in adapters.values())


@pytest.mark.parametrize(("lasts", "every"), [(False, 5), (True, 17)])
async def test_a_fault_at_any_point_leaves_the_catalogue_consistent(
    stores: Callable[[], tuple[Faults, Store]], make: Make, tmp_path: Path, lasts: bool, every: int
) -> None:
    digests = {weights: folder_digest(Path(make(weights))) for weights in "xyz"}
    faults, store = stores()
    assert all(await run(store, make))
    for point in range(1, faults.num_points, every):
        faults, store = stores()
        faults.fails = (lambda n, at=point: n >= at) if lasts else (lambda n, at=point: n == at)
        try:
            acknowledged = await run(store, make)
        except LorafleetError:  # it could not start
            acknowledged = [False] * len(STEPS)
        faults.fails = lambda _: False
        adapters = await read_afresh(store)
        check_files(store, adapters, tmp_path)
        check_outcome(adapters, acknowledged, digests)


async def test_two_servers_of_one_store_never_delete_what_the_other_has_registered(
    stores: Callable[[], tuple[Faults, Store]], make: Make, tmp_path: Path
) -> None:
    _, store = stores()
    async with serving(store, make) as one, serving(store, make) as two:
        await one.push("mine", "x")
        await two.push("yours", "x")
        await one.admin.remove("mine", wait_s=60)  # it has not read that the other has the same bytes
        adapters = await read_afresh(store)
        assert adapters.keys() == {"yours"}
        check_files(store, adapters, tmp_path)


async def test_files_stay_while_another_server_is_about_to_register_them(
    stores: Callable[[], tuple[Faults, Store]], make: Make
) -> None:
    _, store = stores()
    digest = folder_digest(Path(make("x")))
    async with serving(store, make) as one, serving(store, make) as two:
        await one.push("mine", "x")
        async with StoredFiles(two.directory.catalogue).in_use(digest):
            await one.admin.remove("mine", wait_s=60)
            assert store.has_files(digest)
        assert await StoredFiles(one.directory.catalogue).delete_unless_named(digest)
        with pytest.raises(AdapterMissing):
            await two.admin.push(RegisterAdapter("yours", digest, PushTerms("here")))


@pytest.mark.parametrize("whose", ["of the one that deletes", "of the one that registers"])
async def test_files_that_are_about_to_be_registered_outlive_a_jump_of_the_clock(
    stores: Callable[[], tuple[Faults, Store]], make: Make, whose: str
) -> None:
    _, store = stores()
    digest = folder_digest(Path(make("x")))
    jump_s = 0.0
    jumping, right = SteadyClock(lambda: 1e9 + jump_s, lambda: 50.0), SteadyClock(lambda: 1e9, lambda: 50.0)
    clocks = (jumping, right) if whose == "of the one that deletes" else (right, jumping)
    async with serving(store, make) as one, serving(store, make) as two:
        store.put_files(digest, Path(make("x")))
        deleting, registering = (
            StoredFiles(server.directory.catalogue, clock) for server, clock in zip((one, two), clocks, strict=True)
        )
        await deleting.collect()
        jump_s = 2 * stored_files_module.LOCK_S if clocks[0] is jumping else -2 * stored_files_module.LOCK_S
        async with registering.in_use(digest) as lock:
            await deleting.collect()
            assert not await deleting.delete_unless_named(digest)
            lock.check()
        assert store.has_files(digest)


async def test_files_without_a_name_are_collected_when_they_are_old_and_no_others(
    stores: Callable[[], tuple[Faults, Store]], make: Make
) -> None:
    _, store = stores()
    digest = folder_digest(Path(make("orphan")))
    now_s = 1e9
    async with serving(store, make) as server:
        await server.push("sql", "x")
        store.put_files(digest, Path(make("orphan")))
        store.create(f"locks/{digest}.use.{int(now_s)}.left-behind", b"")
        collector = StoredFiles(server.directory.catalogue, lambda: now_s)
        await collector.collect()
        now_s += stored_files_module.ORPHAN_S / 2
        await collector.collect()
        assert store.has_files(digest)
        now_s += stored_files_module.ORPHAN_S
        await collector.collect()
        assert store.stored_digests() == [folder_digest(Path(make("x")))]
        assert store.keys("locks/") == []


def test_a_session_that_has_expired_is_named_and_the_next_client_has_new_credentials() -> None:
    def fail() -> None:
        response = {"Error": {"Code": "ExpiredToken"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
        raise ClientError(response, "PutObject")

    clients = iter([MemoryS3(fail), MemoryS3()])
    store = S3Store("s3://bucket/expired", lambda: next(clients))
    with pytest.raises(StoreError, match=r"refuses this cluster's credentials.*ExpiredToken"):
        store.create("log/1", b"first")
    assert store.create("log/1", b"first")
