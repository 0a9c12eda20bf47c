"""What administrators can do, over real directories, stores and replicas' copies, without Ray."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorafleet.cluster.admin import registration as registration_module
from lorafleet.cluster.admin import removals as removals_module
from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.catalogue import catalogue as catalogue_module
from lorafleet.cluster.catalogue import catalogue_records as records_module
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Share
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_messages import Order
from lorafleet.cluster.serve.adapter_lookup import DirectoryCatalog, obey
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.adapter_formats.sealed_memory import AdapterMemory, map_sealed
from lorafleet.protocol.admin_verbs import (
    ControlEngines,
    PushBytes,
    PushMemory,
    PushTerms,
    RegisterAdapter,
    VerifyAdapter,
)
from lorafleet.protocol.engine_control import PauseEngine, ResumeEngine, SleepEngine, SupersedeAdapter, WakeEngine
from lorafleet.protocol.errors import (
    AdapterChanged,
    AdapterError,
    AdapterMalformed,
    AdapterMissing,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
)
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from tests.cluster.directory import conftest
from tests.cluster.directory.conftest import QUICK, Engine, loaded, replica

make = conftest.make


# No replica here falls silent, and on a busy machine none may seem to.
PATIENT = replace(QUICK, lease_s=4.0, acknowledge_s=5.0, patience_s=30.0)


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


class Cluster:
    """One directory's process; `restart` is the next one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def restart(self) -> None:
        """What the process was at dies with it."""
        for task in asyncio.all_tasks():
            if task.get_name().startswith("removal of"):
                task.cancel()
        await self.start()

    async def start(self) -> None:
        self.directory = await loaded(AdapterDirectory(Catalogue(FolderStore(self.folder)), timing=PATIENT))
        self.admin = Administration(self.directory, ["base"])
        self.admin.resume()

    async def push(self, name: str, path: str, **options: Any) -> AdapterRecord:
        digest = folder_digest(Path(path))
        self.directory.catalogue.store.put_files(digest, Path(path))
        return await self.admin.push(RegisterAdapter(name, digest, PushTerms(path, **options)))

    @property
    def stored(self) -> set[str]:
        return set(os.listdir(self.folder / "adapters"))

    @asynccontextmanager
    async def replicas(self, *engines: Engine) -> AsyncIterator[DirectoryCatalog]:
        """The first one's view."""
        async with asyncio.TaskGroup() as group, replica(self.directory, "r0", engines[0]) as first:
            ended = asyncio.Event()

            async def run(number: int, engine: Engine) -> None:
                async with replica(self.directory, f"r{number}", engine):
                    await ended.wait()

            for number, engine in enumerate(engines[1:], 1):
                group.create_task(run(number, engine))
            await self.directory.replicas.wait_for_ready(len(engines))
            self.admin = Administration(self.directory, ["base"])
            try:
                yield first
            finally:
                ended.set()


@pytest.fixture
async def cluster(tmp_path: Path) -> Cluster:
    starting = Cluster(tmp_path / "catalogue")
    await starting.start()
    return starting


def numbers(adapter: AdapterRecord) -> list[int]:
    return [version.number for version in adapter.versions]


async def test_a_push_loads_before_it_registers_and_pushing_again_changes_nothing(cluster: Cluster, make: Any) -> None:
    engines = Engine(), Engine()
    async with cluster.replicas(*engines) as view:
        first = await cluster.push("sql", make("x"), num_replicas=2)
        assert all(engine.held for engine in engines)
        assert await cluster.push("sql", make("x")) == first
        second = await cluster.push("sql", make("y"), activate=False)
        assert numbers(second) == [1, 2]
        served = await view.resolve("sql")
        assert (served.digest, served.left_out) == (second.versions[0].digest, ("visual",))
        assert second.versions[0].left_out == ("visual",)


async def test_a_push_that_fails_says_where_and_why_and_leaves_nothing(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine(), Engine()):
        with pytest.raises(AdapterMissing, match=r"replica r\d: .* is bad"):
            await cluster.push("sql", make("bad"), num_replicas=2)
        with pytest.raises(InvalidRequest, match="replicas is 3; this cluster has 2"):
            await cluster.push("sql", make("x"), num_replicas=3)
        assert await cluster.admin.list_adapters() == []
        assert cluster.stored == set()


async def test_a_restart_brings_back_versions_aliases_history_and_pins(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()):
        for name in ("x", "y"):
            await cluster.push("sql", make(name), metadata={"run": name})
        await cluster.admin.alias("sql", [Share(1, 3.0), Share(2, 1.0)], "sql-canary")
        before = await cluster.admin.pin("sql")
    await cluster.restart()
    assert await cluster.admin.show("sql") == before
    assert before.versions[1].metadata == {"run": "y"}
    engine = Engine()
    async with cluster.replicas(engine):
        digests = {version.digest for version in before.versions}
        await until(lambda: engine.pinned == digests)  # the split keeps both


async def test_rollback_undoes_one_move_after_another(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()) as view:
        for name in ("x", "y", "z"):
            await cluster.push("sql", make(name))
        for name in ("y", "x"):
            await cluster.admin.rollback("sql")
            assert (await view.resolve("sql")).digest == folder_digest(Path(make(name)))
        with pytest.raises(InvalidRequest, match="only ever stood for version 1"):
            await cluster.admin.rollback("sql")


async def test_a_split_is_drawn_by_weight_and_by_key_alike_on_all_replicas(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()) as view, replica(cluster.directory, "other", Engine()) as other:
        for name in ("x", "y"):
            await cluster.push("sql", make(name))
        await cluster.admin.alias("sql", [Share(1, 9.0), Share(2, 1.0)])
        drawn = [(await view.resolve("sql", f"key {i}")).digest for i in range(1000)]
        assert drawn == [(await other.resolve("sql", f"key {i}")).digest for i in range(1000)]
        by_chance = Counter([(await view.resolve("sql")).digest for _ in range(1000)])
        for counts in (Counter(drawn), by_chance):
            assert 50 < counts[folder_digest(Path(make("y")))] < 150


async def test_pins_follow_the_alias_and_the_replicas(cluster: Cluster, make: Any) -> None:
    engines = Engine(), Engine()
    async with cluster.replicas(*engines):
        x = (await cluster.push("sql", make("x"))).versions[0].digest
        await cluster.admin.pin("sql", 1)
        [home] = [engine for engine in engines if engine.pinned]
        y = (await cluster.push("sql", make("y"))).versions[1].digest
        await until(lambda: home.pinned == {y} != {x})
        [other] = [engine for engine in engines if engine is not home]
        cluster.directory.replicas.forget(f"r{engines.index(home)}")
        await until(lambda: other.pinned == {y})
        await cluster.admin.unpin("sql")
        await until(lambda: not other.pinned)


async def test_a_pin_that_a_replica_refuses_is_undone(cluster: Cluster, make: Any) -> None:
    class Full(Engine):
        async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo:
            raise AdapterError(f"pinning {lora.lora_name} would pin all 2 slots")

    async with cluster.replicas(Full()):
        await cluster.push("sql", make("x"))
        with pytest.raises(AdapterError, match="replica r0: pinning sql would pin all 2 slots"):
            await cluster.admin.pin("sql")
        assert (await cluster.admin.show("sql")).pinned_replicas == 0


async def test_removal_waits_for_requests_and_frees_every_replica_and_the_store(cluster: Cluster, make: Any) -> None:
    engines = Engine(), Engine()
    async with cluster.replicas(*engines) as view:
        digest = (await cluster.push("sql", make("x"), num_replicas=2)).versions[0].digest
        engines[1].busy[digest] = asyncio.Event()
        with pytest.raises(Overloaded, match="requests for it are still running"):
            await cluster.admin.remove("sql", wait_s=0.2)
        with pytest.raises(ModelNotFound):
            await view.resolve("sql")
        assert cluster.stored == {digest} and engines[1].held == {digest}
        engines[1].busy.pop(digest).set()
        await cluster.admin.remove("sql", wait_s=5)
        assert cluster.stored == set() and not any(engine.held for engine in engines)
        assert await cluster.admin.list_adapters() == []
        assert numbers(await cluster.push("sql", make("x"))) == [1]


async def test_a_push_beside_a_removal_of_its_name_waits_for_its_end(cluster: Cluster, make: Any) -> None:
    """Also if the removal begins while the push is loading its version."""

    class RemovedMeanwhile(Engine):
        async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
            info = await super().load_adapter(lora)
            if info.digest == second and first in self.busy:
                await cluster.admin.remove("sql", wait_s=0)
                asyncio.get_running_loop().call_later(0.05, self.busy.pop(first).set)
            return info

    first, second = (folder_digest(Path(make(name))) for name in ("x", "y"))
    engine = RemovedMeanwhile()
    async with cluster.replicas(engine) as view:
        await cluster.push("sql", make("x"))
        engine.busy[first] = asyncio.Event()
        pushed = await cluster.push("sql", make("y"))
        assert [version.digest for version in pushed.versions] == [second] and first not in engine.busy
        assert (await view.resolve("sql")).digest == second
        assert cluster.stored == {second}


async def test_an_adapter_that_is_being_removed_still_counts_for_its_tenant(cluster: Cluster, make: Any) -> None:
    engine = Engine()
    async with cluster.replicas(engine):
        most = len("{}") + len("x")  # config and weights
        digest = (await cluster.push("~acme/one", make("x"), max_bytes=most)).versions[0].digest
        engine.busy[digest] = asyncio.Event()
        await cluster.admin.remove("~acme/one", wait_s=0)
        with pytest.raises(QuotaExceeded, match="with all files of all versions"):
            await cluster.push("~acme/two", make("y"), max_bytes=most)
        engine.busy.pop(digest).set()
        await cluster.admin.remove("~acme/one", wait_s=5)
        await cluster.push("~acme/two", make("y"), max_bytes=most)


async def test_no_lock_is_kept_of_digests_that_were_pushed_once(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()):
        for name in ("x", "y", "z"):
            await cluster.push("sql", make(name))
        await cluster.admin.remove("sql")
        with pytest.raises(AdapterMissing):
            await cluster.push("sql", make("bad"))
        assert cluster.directory.catalogue.store.keys("locks/") == []


async def test_a_removal_goes_on_after_a_restart(cluster: Cluster, make: Any) -> None:
    engine = Engine()
    async with cluster.replicas(engine):
        digest = (await cluster.push("sql", make("x"))).versions[0].digest
        engine.busy[digest] = asyncio.Event()
        await cluster.admin.remove("sql", wait_s=0)
    await cluster.restart()
    async with cluster.replicas(Engine()):
        await until(lambda: "sql" not in cluster.directory.catalogue.state.adapters)
        assert cluster.stored == set()
        with pytest.raises(ModelNotFound):
            await cluster.admin.show("sql")


async def test_bytes_that_another_adapter_has_too_stay(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()) as view:
        for name in ("a", "b"):
            await cluster.push(name, make("x"))
        await cluster.admin.remove("a", wait_s=5)
        assert cluster.stored == {(await view.resolve("b")).digest}
        await cluster.admin.remove("b", wait_s=5)
        assert cluster.stored == set()


async def test_old_versions_go_when_there_are_too_many_but_never_served_ones(
    cluster: Cluster, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals_module, "MAX_VERSIONS", 3)
    async with cluster.replicas(Engine()):
        await cluster.push("sql", make("v1"))
        await cluster.admin.alias("sql", [Share(1, 1.0)], "stable")
        for i in range(2, 6):
            adapter = await cluster.push("sql", make(f"v{i}"))
        assert numbers(adapter) == [1, 4, 5]
        await until(lambda: len(cluster.stored) == 3)
        assert [move.shares[0].version for move in adapter.aliases["sql"]] == [1, 4, 5]


async def test_verify_finds_bytes_that_rotted(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()):
        adapter = await cluster.push("sql", make("x"))
        assert await cluster.admin.verify("sql") == list(adapter.versions)
        stored = cluster.folder / "adapters" / adapter.versions[0].digest / "adapter_model.safetensors"
        stored.write_text("y")
        with pytest.raises(AdapterChanged, match="version 1 of adapter 'sql'"):
            await cluster.admin.verify("sql")


async def test_aliases_and_the_record_of_an_adapter_have_bounds(
    cluster: Cluster, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "MAX_ALIASES", 3)
    monkeypatch.setattr(catalogue_module, "MAX_ENTRY_BYTES", 4000)
    async with cluster.replicas(Engine()):
        await cluster.push("sql", make("x"))
        for name in ("one", "two", "two"):
            await cluster.admin.alias("sql", [Share(1, 1.0)], name)
        with pytest.raises(InvalidRequest, match="has 3 aliases; at most 3"):
            await cluster.admin.alias("sql", [Share(1, 1.0)], "three")
        before = await cluster.admin.show("sql")
        with pytest.raises(InvalidRequest, match=r"would have \d+ bytes; at most 4000"):
            await cluster.push("sql", make("y"), metadata={"note": "x" * 4000})
        assert await cluster.admin.show("sql") == before
        assert cluster.stored == {before.versions[0].digest}


async def test_a_name_cannot_be_two_adapters(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()):
        for name in ("a", "b"):
            await cluster.push(name, make(name))
        await cluster.admin.alias("a", [Share(1, 1.0)], "shared")
        with pytest.raises(AdapterError, match="'shared' is an alias of adapter 'a'"):
            await cluster.push("shared", make("c"))
        with pytest.raises(AdapterError, match="'shared' is an alias of adapter 'a'"):
            await cluster.admin.alias("b", [Share(1, 1.0)], "shared")
        await cluster.admin.unalias("a", "shared")
        await cluster.admin.alias("b", [Share(1, 1.0)], "shared")


async def test_weights_from_memory_are_stored_and_served_as_a_folders_are(cluster: Cluster) -> None:
    async with cluster.replicas(Engine()) as view:
        terms = PushTerms("memory", metadata={"step": "100"})
        pushed = await cluster.admin.carry_out(
            PushBytes("sql", b'{"r": 8}', np.frombuffer(b"some weights", np.uint8), terms)
        )
        [version] = pushed.versions
        assert (version.source, version.metadata, cluster.stored) == ("memory", {"step": "100"}, {version.digest})
        assert (await view.resolve("sql")).digest == version.digest
        assert (await cluster.admin.carry_out(VerifyAdapter("sql"))).verified == [1]


@pytest.mark.parametrize("num_bytes", [0, 7])
async def test_weights_that_are_too_short_for_a_header_are_refused(cluster: Cluster, num_bytes: int) -> None:
    async with cluster.replicas(Engine()):
        with pytest.raises(AdapterMalformed, match=f"{num_bytes} bytes is truncated"):
            await cluster.admin.carry_out(PushBytes("sql", b"{}", np.zeros(num_bytes, np.uint8), PushTerms("memory")))
        assert not list(cluster.folder.glob("adapters/*"))


class MappingEngine(Engine):
    """Also loads content in memory, and remembers what it found there."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped: list[tuple[bytes, bytes]] = []

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        if lora.memory is None:
            return await super().load_adapter(lora)
        content = map_sealed(lora.memory)
        assert content is not None
        self.mapped.append((content.config, bytes(content.weights)))
        return AdapterInfo(lora.digest, 8, 1, ["q_proj"])


async def test_replicas_of_the_node_load_sealed_memory_and_the_catalogue_keeps_it(cluster: Cluster) -> None:
    engines = MappingEngine(), MappingEngine()
    memory = AdapterMemory(b'{"r": 8}', 7)
    memory.write(b"weights", 0)
    push = PushMemory("sql", memory.seal(), PushTerms("memory", num_replicas=None))
    async with cluster.replicas(*engines):
        [version] = (await cluster.admin.carry_out(push)).versions
        assert all(engine.mapped == [(b'{"r": 8}', b"weights")] for engine in engines)
        assert cluster.stored == {version.digest}
        assert (await cluster.admin.carry_out(VerifyAdapter("sql"))).verified == [1]
        memory.close()
        with pytest.raises(AdapterMissing, match="another node"):
            await cluster.admin.carry_out(push)


async def test_a_replica_leaves_memory_of_another_node_to_the_files() -> None:
    memory = AdapterMemory(b"{}", 8)
    lora, engine = LoRARequest("sql", 1, "/files", "d", memory=memory.seal()), MappingEngine()
    info = await obey(engine, Order(1, "load", lora))
    assert info is not None and len(engine.mapped) == 1
    memory.close()
    assert await obey(engine, Order(2, "load", lora)) is None
    assert len(engine.mapped) == 1 and not engine.reads


async def test_a_pause_and_a_resume_reach_every_replica_and_one_that_joins_meanwhile(cluster: Cluster) -> None:
    engines = Engine(), Engine()
    pause, late = PauseEngine("keep"), Engine()
    async with cluster.replicas(*engines):
        done = await cluster.admin.carry_out(ControlEngines(pause))
        assert sorted(done.replicas) == ["r0", "r1"]
        assert [engine.controls for engine in engines] == [[pause], [pause]]
        async with replica(cluster.directory, "r2", late):
            await until(lambda: late.controls == [pause])
            await cluster.admin.carry_out(ControlEngines(ResumeEngine()))
            assert all(engine.controls == [pause, ResumeEngine()] for engine in (*engines, late))


async def test_a_replica_that_joins_during_a_sleep_sleeps_too(cluster: Cluster) -> None:
    late, later = Engine(), Engine()
    async with cluster.replicas(Engine()):
        await cluster.admin.carry_out(ControlEngines(SleepEngine(2, "abort", ("kv_cache",))))
        await cluster.admin.carry_out(ControlEngines(SleepEngine(2, "abort")))
        async with replica(cluster.directory, "r1", late):
            await until(lambda: late.controls == [SleepEngine(2, "keep")])
            await cluster.admin.carry_out(ControlEngines(WakeEngine(("weights",))))
            async with replica(cluster.directory, "r2", later):
                await until(lambda: later.controls == [SleepEngine(2, "keep", ("kv_cache",))])
                await cluster.admin.carry_out(ControlEngines(WakeEngine()))
    woken = Engine()
    async with cluster.replicas(woken):
        await cluster.admin.carry_out(ControlEngines(ResumeEngine()))
        assert woken.controls == [ResumeEngine()]


async def test_a_push_with_a_policy_is_loaded_and_in_force_on_every_replica(
    cluster: Cluster, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration_module, "SETTLE_S", 0.01)
    engines = Engine(), Engine()
    async with cluster.replicas(*engines) as view:
        await cluster.push("sql", make("x"))
        pushed = await cluster.push("sql", make("y"), in_flight="switch")
        new = await view.resolve("sql")
        assert (new.digest, new.version) == (pushed.versions[1].digest, 2)
        order = SupersedeAdapter(new, aborts=False)
        assert all(new.digest in engine.held for engine in engines)
        # The second order is for requests that found the former version before the push.
        await until(lambda: all(engine.controls == [order, order] for engine in engines))


async def test_a_push_loads_on_all_replicas_if_no_number_is_given(cluster: Cluster, make: Any) -> None:
    engines = Engine(), Engine()
    async with cluster.replicas(*engines):
        await cluster.push("sql", make("x"), num_replicas=None)
        assert all(engine.held for engine in engines)
