"""Runs a thousand simulated replicas in one process.

Each replica has its own Membership and Reporter and its own connection to the directory's real actor; only its engine
is simulated. benchmarks/directory_cluster.py starts it and controls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import resource
import time
from collections import Counter

import ray

from lorafleet.cluster.directory.directory_actor import DirectoryPlace, get_or_create
from lorafleet.cluster.directory.directory_messages import Order
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.serve.reporting import keep_reporting
from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.protocol.messages import EngineStats

SLOTS, IN_CPU = 32, 128
# Seconds between statistics, as in workers/worker.py; the second value is for an idle engine.
BUSY_S, IDLE_S = 0.1, 1.0


class SimulatedEngine:
    """Implements the part of protocol/transport/engine_socket.py that cluster/serve/reporting.py uses. While it is
    busy, all statistics differ from the previous ones."""

    def __init__(self, number: int, digests: list[str]) -> None:
        self.stats = EngineStats()
        self.tokens_asked: Counter[str] = Counter()
        self.digests = digests
        self.busy = False
        self._random = random.Random(number)
        self._moved = asyncio.Event()
        self._due_s = time.monotonic() + self._random.random()

    async def next_stats(self) -> EngineStats:
        self._due_s = max(self._due_s + (BUSY_S if self.busy else IDLE_S), time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._moved.wait(), self._due_s - time.monotonic())
        self._moved.clear()
        running = 1 + self._random.randrange(200) if self.busy else 0
        if self.busy:
            self.tokens_asked[self._random.choice(self.digests)] += 300
        self.stats = EngineStats(
            num_running=running,
            resident_slots=self.digests[:SLOTS],
            resident_cpu=self.digests[SLOTS:],
            lora_usable=1,
        )
        return self.stats

    def swap(self) -> None:
        """Exchanges the first adapter in host memory with a random one in a slot."""
        slot = self._random.randrange(SLOTS)
        self.digests[slot], self.digests[SLOTS] = self.digests[SLOTS], self.digests[slot]
        self._moved.set()


async def _obey(_: Order) -> AdapterInfo | None:
    return None


class Fleet:
    def __init__(self, place: DirectoryPlace, num_replicas: int, num_adapters: int) -> None:
        rng = random.Random(0)
        self.ids = [f"replica-{i}" for i in range(num_replicas)]
        names = [rng.sample(range(num_adapters), SLOTS + IN_CPU) for _ in self.ids]
        self.engines = [SimulatedEngine(i, [f"{number:064x}" for number in held]) for i, held in enumerate(names)]
        self.resident = [f"adapter-{held[0]}" for held in names]
        self.members = [Membership(get_or_create(place), replica_id, _obey) for replica_id in self.ids]
        self._reporting: list[asyncio.Task[None]] = []
        self._swapping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for i in range(0, len(self.members), 50):
            await asyncio.gather(*(member.start() for member in self.members[i : i + 50]))
            await asyncio.gather(*(member.become_ready() for member in self.members[i : i + 50]))
        for member, engine in zip(self.members, self.engines, strict=True):
            work = keep_reporting(engine, member, SLOTS + IN_CPU, 256)  # type: ignore[arg-type]  # It implements all that is used.
            self._reporting.append(asyncio.create_task(work))
        for i in range(len(self.ids)):
            await self.lookup(i)

    def set_busy(self, busy: bool, swaps_per_s: float) -> None:
        """Sets the load of all replicas: whether they report ten times a second, and the swaps per second of the
        fleet."""
        for engine in self.engines:
            engine.busy = busy
        if self._swapping is not None:
            self._swapping.cancel()
        self._swapping = asyncio.create_task(self._swap(swaps_per_s)) if swaps_per_s else None

    async def lookup(self, replica: int) -> float:
        """Returns the seconds that a request on this replica waits until its adapter's name is resolved."""
        started = time.perf_counter()
        assert await self.members[replica].lookup(self.resident[replica]) is not None
        return time.perf_counter() - started

    def swap_all(self) -> dict[str, dict[str, str]]:
        """Swaps an adapter on every replica, and returns each replica's residency by tier."""
        for engine in self.engines:
            engine.swap()
        return {
            replica_id: dict.fromkeys(engine.digests[SLOTS:], "cpu") | dict.fromkeys(engine.digests[:SLOTS], "gpu")
            for replica_id, engine in zip(self.ids, self.engines, strict=True)
        }

    async def _swap(self, per_s: float) -> None:
        while True:
            random.choice(self.engines).swap()
            await asyncio.sleep(1 / per_s)


@ray.remote(num_cpus=0, max_concurrency=100)
class FleetActor:
    """Runs a Fleet in a process of its own."""

    def __init__(self, place: DirectoryPlace, num_replicas: int, num_adapters: int) -> None:
        # The library would log a line for each replica that has lost the directory.
        logging.getLogger("lorafleet").setLevel(logging.ERROR)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._fleet = Fleet(place, num_replicas, num_adapters)

    async def start(self) -> list[str]:
        await self._fleet.start()
        return self._fleet.ids

    async def set_busy(self, busy: bool, swaps_per_s: float = 0.0) -> None:
        self._fleet.set_busy(busy, swaps_per_s)

    async def swap_all(self) -> dict[str, dict[str, str]]:
        return self._fleet.swap_all()

    async def lookups(self, seconds: float) -> list[float]:
        """Looks up resident adapters for this many seconds, on a hundred replicas at a time."""
        until, took = time.monotonic() + seconds, list[float]()
        while time.monotonic() < until:
            some = random.sample(range(len(self._fleet.ids)), min(100, len(self._fleet.ids)))
            took += await asyncio.gather(*(self._fleet.lookup(i) for i in some))
            await asyncio.sleep(0.02)
        return took
