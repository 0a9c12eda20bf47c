"""The directory, the replicas' copies of it and the catalogue below it, in one event loop and without Ray."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import TypeVar

import pytest

from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.admin.pushing import AdapterAdmin
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_log import CatalogueLog
from lorafleet.cluster.catalogue.catalogue_records import RemovalRecord
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory import adapter_names
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_calls import Answer, DirectoryCall, LookupCall, WatchCall
from lorafleet.cluster.directory.directory_messages import StaleEpoch
from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.directory.residency import Report, RouteView
from lorafleet.cluster.routing.routing import ReplicaChooser, ReplicaLoad, Tier
from lorafleet.cluster.serve.adapter_lookup import SEARCHES, DirectoryCatalog, obey
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.admin_verbs import Verb
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import (
    AdapterExists,
    AdapterMissing,
    InvalidAdapterName,
    ModelNotFound,
    Overloaded,
    QueueFull,
    StoreError,
)
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.names import PAST_ALL, full_name, tenant_of
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore

Make = Callable[[str], str]
# Leases end soon, but no replica seems to be silent where the machine is slow.
QUICK = DirectoryTiming(hold_s=0.05, lease_s=0.6, acknowledge_s=0.9, patience_s=60.0, retry_s=0.01)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Folders of adapters, made when they are first named; their weights are their name."""

    def adapter(name: str) -> str:
        folder = tmp_path / "adapters" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_text(name)
        return str(folder)

    return adapter


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(FolderStore(tmp_path / "catalogue"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)


D = TypeVar("D", bound=AdapterDirectory)
T = TypeVar("T")


async def loaded(directory: D) -> D:
    await directory.load()
    return directory


class Engine:
    """Reads files, but understands nothing of them: "bad" ones fail."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.held: set[str] = set()
        self.pinned: set[str] = set()
        self.controls: list[EngineControl] = []
        self.busy: dict[str, asyncio.Event] = {}  # digests with requests in flight, until they end

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        self.reads.append(lora.lora_path)
        await asyncio.sleep(0.01)
        digest = folder_digest(Path(lora.lora_path))
        if (Path(lora.lora_path) / "adapter_model.safetensors").read_text() == "bad":
            raise AdapterMissing(f"{lora.lora_path} is bad")
        self.held.add(digest)
        return AdapterInfo(digest, 8, 1, ["q_proj"])

    async def drop_adapter(self, digest: str) -> None:
        self.held.discard(digest)

    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo:
        info = await self.load_adapter(lora)
        self.pinned.add(info.digest)
        return info

    async def unpin_adapter(self, digest: str) -> None:
        self.pinned.discard(digest)

    async def drained(self, digest: str) -> None:
        if digest in self.busy:
            await self.busy[digest].wait()

    async def control(self, control: EngineControl) -> None:
        self.controls.append(control)


class Folder:
    def __init__(self, make: Make, *names: str) -> None:
        self.make, self.names = make, names
        self.asked: list[str] = []

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append(lora_name)
        await asyncio.sleep(0.01)
        if lora_name not in self.names:
            return None
        return LoRARequest(lora_name, 1, self.make(lora_name), base_model_name=base_model_name)


@asynccontextmanager
async def replica(
    directory: AdapterDirectory, name: str, engine: Engine, folder: Folder | None = None
) -> AsyncIterator[DirectoryCatalog]:
    async def administer(verb: Verb[T]) -> T:
        return await Administration(directory, ["base"]).carry_out(verb)

    membership = Membership(directory, name, lambda order: obey(engine, order, settle_s=0.01), timing=directory.timing)
    await membership.start()
    await membership.become_ready()
    admin = AdapterAdmin(administer, directory.catalogue.store, ["base"], "run", AdapterStore(SourcesConfig()))
    try:
        yield DirectoryCatalog(membership, admin, engine, ["base"], folder)
    finally:
        await membership.stop()


async def digests(catalog: DirectoryCatalog) -> list[str]:
    return [lora.digest for lora in await catalog.listed("", PAST_ALL, 1000)]


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
        """What a new process would do."""
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


def full_report(replica_id: str, tiers: dict[str, Tier], tokens: dict[str, int] | None = None) -> Report:
    return Report(replica_id, 1, True, dict(tiers), ReplicaLoad(), tokens or {}, cpu_loras=8)


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
