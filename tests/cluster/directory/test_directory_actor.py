"""The directory's real actor, killed under the replicas and a router that use it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.log_end import LogEnd
from lorafleet.cluster.directory.directory_actor import DirectoryPlace, RemoteDirectory, _rather_on_head, get_or_create
from lorafleet.cluster.directory.directory_calls import Answer, CountsCall, DirectoryCall, LookupCall, RoutesCall
from lorafleet.cluster.directory.directory_messages import Order
from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.directory.residency import RouteView
from lorafleet.cluster.routing.routing import ReplicaChooser, Tier
from lorafleet.cluster.serve.reporting import keep_reporting
from lorafleet.protocol.admin_verbs import ListAdapters, RemoveAdapter, SeedAdapter
from lorafleet.protocol.errors import DirectoryUnavailable
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import EngineStats
from tests.cluster.rays_turn import rays_turn

pytestmark = [
    pytest.mark.xdist_group("own_server"),
    pytest.mark.usefixtures("_cluster"),
]
NUM_REPLICAS = 8
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    with rays_turn():
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=80 << 20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    yield
    ray.shutdown()


class Engine:
    """What a Reporter needs of one."""

    def __init__(self, *in_slots: str) -> None:
        self.in_slots = list(in_slots)
        self.tokens_asked: dict[str, int] = {}
        self.stats = EngineStats()

    async def next_stats(self) -> EngineStats:
        await asyncio.sleep(0.05)
        self.stats = EngineStats(resident_slots=list(self.in_slots))
        return self.stats


async def obey(_: Order) -> AdapterInfo | None:
    return None


async def follow(view: RouteView, directory: RemoteDirectory) -> None:
    """As cluster/routing/router.py does."""
    while True:
        with contextlib.suppress(OSError, ray.exceptions.RayError):
            view.apply(await directory.ask(RoutesCall(view.epoch, view.version)))
            continue
        await asyncio.sleep(0.05)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def directory_processes() -> list[psutil.Process]:
    from living import command, family  # Ray's workers, which import this file, do not have it

    return [one for one in family(os.getpid()) if any("DirectoryActor" in part for part in command(one))]


async def test_a_killed_directory_is_back_with_the_catalogue_and_right_residency_and_requests_never_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = DirectoryPlace("test", "/model", str(tmp_path), ("base",), fill_cpu_loras=False)
    engines = [Engine(f"own{i}", "shared") for i in range(NUM_REPLICAS)]
    # However slow this machine is to start a process, copies are used.
    timing = DirectoryTiming(lease_s=2 * PATIENCE_S)
    members = [Membership(get_or_create(place), f"r{i}", obey, timing=timing) for i in range(NUM_REPLICAS)]
    router, view = get_or_create(place), RouteView(ReplicaChooser())
    view.chooser.set_replicas([one.replica_id for one in members])
    tasks = [asyncio.create_task(follow(view, router))]
    for member, engine in zip(members, engines, strict=True):
        await member.start()
        await member.become_ready()
        tasks.append(asyncio.create_task(keep_reporting(engine, member, 8, 8)))  # type: ignore[arg-type]  # as much as it uses
    sql = LoRARequest("sql", 1, "/sql", "shared")
    await members[0].found(sql)
    for member in members:
        assert await member.lookup("sql") is not None

    def table() -> dict[str, dict[str, Tier]]:
        return {adapter: dict(holders) for adapter, holders in view.chooser._tiers.items()}

    def truth() -> dict[str, dict[str, Tier]]:
        found: dict[str, dict[str, Tier]] = {}
        for member, engine in zip(members, engines, strict=True):
            for digest in engine.in_slots:
                found.setdefault(digest, {})[member.replica_id] = "gpu"
        return found

    await until(lambda: table() == truth())
    epoch = view.epoch
    ask_directory = RemoteDirectory.ask

    async def ask_no_names(directory: RemoteDirectory, call: DirectoryCall[Answer]) -> Answer:
        assert not isinstance(call, LookupCall)
        return await ask_directory(directory, call)

    monkeypatch.setattr(RemoteDirectory, "ask", ask_no_names)
    for one in directory_processes():
        one.kill()
    engines[0].in_slots.append("new")  # nobody hears of it
    engines[1].in_slots.remove("own1")

    async def ask() -> None:
        for member in members:
            served = await member.lookup("sql")
            assert served is not None
            assert (served.loras[0].digest, view.adapter("sql")) == ("shared", "shared")

    deadline = time.monotonic() + PATIENCE_S
    while view.epoch == epoch or table() != truth():
        assert time.monotonic() < deadline
        await ask()
        await asyncio.sleep(0.02)
    await ask()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for member in members:
        await member.stop()
        member.directory.close()  # type: ignore[attr-defined]  # a RemoteDirectory
    router.close()
    await asyncio.sleep(0.01)  # until the transports have noticed


async def test_two_directories_of_one_catalogue_soon_see_what_the_other_has_written(tmp_path: Path) -> None:
    places = [DirectoryPlace(app, "/model", str(tmp_path), ("base",), fill_cpu_loras=False) for app in ("one", "two")]
    one, two = [get_or_create(place) for place in places]
    lora = LoRARequest("sql", 1, "/sql", "digest")
    await one.administer(SeedAdapter(lora, AdapterInfo("digest", 8, 1, []), "run"))
    deadline = time.monotonic() + PATIENCE_S
    while not (await two.administer(ListAdapters())).data:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await one.administer(RemoveAdapter("sql"))
    while (await two.administer(ListAdapters())).data:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_a_stopped_directory_keeps_nobody_waiting_and_known_names_are_served(tmp_path: Path) -> None:
    others = {one.pid for one in directory_processes()}
    place = DirectoryPlace("stopped", "/model", str(tmp_path), ("base",), fill_cpu_loras=False)
    directory = get_or_create(place)
    timing = DirectoryTiming(patience_s=6.0)  # more than a call is held, as it is without this
    member = Membership(directory, "r0", obey, log_end=LogEnd(lambda: FolderStore(tmp_path)), timing=timing)
    await member.start()
    lora = LoRARequest("sql", 1, "/sql", "digest")
    await directory.administer(SeedAdapter(lora, AdapterInfo("digest", 8, 1, []), "run"))
    known = await member.lookup("sql")
    [process] = [one for one in directory_processes() if one.pid not in others]
    process.suspend()
    try:
        with pytest.raises(DirectoryUnavailable):
            await asyncio.wait_for(member.lookup("unknown"), PATIENCE_S)
        assert not member.fresh
        assert await member.lookup("sql") == known
    finally:
        process.resume()
    deadline = time.monotonic() + PATIENCE_S
    while not member.fresh:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert await member.lookup("unknown") is None
    await member.stop()
    directory.close()
    await asyncio.sleep(0.01)


async def test_ray_s_head_does_not_remember_the_directory_s_calls(tmp_path: Path) -> None:
    """It would keep 100 000 of them, 2 KB each. What is called after them is there once they would be."""
    directory = get_or_create(DirectoryPlace("calls", "/model", str(tmp_path), ("base",), fill_cpu_loras=False))
    await directory.administer(ListAdapters())  # may take as long as a process takes to start
    await directory.ask(CountsCall())
    ray.get(ray.remote(remembered).remote())
    deadline = time.monotonic() + PATIENCE_S
    names = ""
    while "remembered" not in names:
        assert time.monotonic() < deadline, names
        await asyncio.sleep(0.1)
        names = " ".join(event["cat"] for event in ray.timeline() or ())  # type: ignore[no-untyped-call]  # Ray's own omission
    assert "DirectoryActor" not in names


def remembered() -> None:
    pass


async def test_with_s3_the_directory_is_rather_on_the_head() -> None:
    strategy = _rather_on_head()
    (node,) = ray.nodes()
    assert isinstance(strategy, NodeAffinitySchedulingStrategy)
    assert (strategy.node_id, strategy.soft) == (node["NodeID"], True)
