"""Measures the directory's real actor with the reports of 1,000 replicas and one router.

It reports how soon a change of residency reaches the router's table, the cost of reports, and the effect of a killed
directory on requests and routers. It starts a Ray cluster of its own on this machine with three processes: the
directory, all simulated replicas, and this process with the router's table and a replica whose changes are timed.

    python benchmarks/directory_cluster.py [--replicas 1000] [--adapters 100000] [--log FOLDER of directory_scale.py]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from directory_fleet import FleetActor
from directory_scale import digest_of, in_own_process, write_log
from lorafleet.cluster.directory.directory_actor import NAMESPACE, DirectoryPlace, RemoteDirectory, get_or_create
from lorafleet.cluster.directory.directory_calls import CountsCall, JoinCall, ReportCall, RoutesCall
from lorafleet.cluster.directory.residency import Report, RouteView
from lorafleet.cluster.routing.routing import ReplicaChooser, ReplicaLoad

NUM_CHANGES = 500
LOAD_S = 15.0
PROBE = "probe"
RETRY_S = 0.1  # The same value as in cluster/routing/router.py.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--swaps", type=float, default=500, help="changes of residency per second, over all replicas")
    parser.add_argument("--log", type=Path, help="folder of the catalogue, which is kept and reused by later runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="directory-cluster-") as folder:
        log = args.log or Path(folder)
        in_own_process(write_log, log, args.adapters)
        os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}"
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 << 20,
            namespace=NAMESPACE,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        asyncio.run(Run(args.replicas, args.adapters, args.swaps, log).all())
        ray.shutdown()


class Run:
    def __init__(self, num_replicas: int, num_adapters: int, swaps_per_s: float, log: Path) -> None:
        self._place = DirectoryPlace("bench", "/model", str(log), ("base",), fill_cpu_loras=False)
        self._num = num_replicas
        self._num_adapters = num_adapters
        self._swaps_per_s = swaps_per_s
        self._view = RouteView(ReplicaChooser())
        self._applied = asyncio.Event()
        self._sequence = itertools.count(1)
        self._num_polls = 0

    async def all(self) -> None:
        started = time.perf_counter()
        directory = get_or_create(self._place)
        await directory.ask(JoinCall(PROBE, "", [], [], True))
        print(f"directory ready after {time.perf_counter() - started:.2f} s, {self._memory()}")
        following = asyncio.create_task(self._follow())
        fleet: Any = FleetActor.remote(self._place, self._num, self._num_adapters)  # type: ignore[attr-defined]  # Ray's
        started = time.perf_counter()
        ids = await fleet.start.remote()
        self._view.chooser.set_replicas([*ids, PROBE])
        await asyncio.sleep(1.0)
        print(f"{self._num} replicas joined after {time.perf_counter() - started:.1f} s, {self._memory()}")
        print(f"a change, replicas idle: {_quantiles(await self._visible(directory))}")
        await fleet.set_busy.remote(True, self._swaps_per_s)
        await asyncio.sleep(2.0)
        await self._under_load(directory)
        print(f"a change, replicas busy: {_quantiles(await self._visible(directory))}")
        await fleet.set_busy.remote(False)
        await asyncio.sleep(1.0)
        for _ in range(3):
            await self._kill(fleet)
        following.cancel()

    async def _visible(self, directory: RemoteDirectory) -> list[float]:
        """Returns the seconds from sending each report until its change is in the router's table."""
        took = []
        assert await directory.ask(ReportCall(Report(PROBE, next(self._sequence), True, {}, ReplicaLoad())))
        for number in range(NUM_CHANGES):
            digest, sequence = digest_of(10**9 + number), next(self._sequence)
            started = time.perf_counter()
            report = Report(PROBE, sequence, False, {digest: "gpu"}, ReplicaLoad())
            sent = asyncio.create_task(directory.ask(ReportCall(report)))
            while digest not in self._view.chooser._tiers:
                self._applied.clear()
                await self._applied.wait()
            took.append(time.perf_counter() - started)
            assert await sent
            cleared = Report(PROBE, next(self._sequence), False, {digest: None}, ReplicaLoad())
            assert await directory.ask(ReportCall(cleared))
            await asyncio.sleep(0.01)
        return took

    async def _under_load(self, directory: RemoteDirectory) -> None:
        process = self._process()
        reports, cpu_s, polls, started = (
            await self._num_reports(directory),
            _cpu_s(process),
            self._num_polls,
            time.time(),
        )
        await asyncio.sleep(LOAD_S)
        seconds = time.time() - started
        num_reports = await self._num_reports(directory) - reports
        used = _cpu_s(process) - cpu_s
        print(
            f"{num_reports / seconds:.0f} reports/s, one router polling "
            f"{(self._num_polls - polls) / seconds:.0f}/s: the directory uses {used / seconds:.2f} cores, "
            f"{1e6 * used / num_reports:.0f} us for each report, all in all; {self._memory()}"
        )

    async def _num_reports(self, directory: RemoteDirectory) -> int:
        return (await directory.ask(CountsCall())).reports

    async def _kill(self, fleet: Any) -> None:
        """Kills the directory; at that moment every replica changes its resident adapters."""
        epoch, process = self._view.epoch, self._process()
        lookups = fleet.lookups.remote(12.0)
        await asyncio.sleep(1.0)
        process.kill()
        killed = time.perf_counter()
        truth = await fleet.swap_all.remote()
        while self._view.epoch == epoch:
            self._applied.clear()
            await self._applied.wait()
        answered_s = time.perf_counter() - killed
        while not self._is_right(truth):
            self._applied.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._applied.wait(), 0.1)
        right_s = time.perf_counter() - killed
        took = await lookups
        print(
            f"killed: the new directory answers after {answered_s:.2f} s, residency is correct after {right_s:.2f} s; "
            f"{len(took)} lookups of resident adapters meanwhile: {_quantiles(took)}, at most {1e3 * max(took):.2f} ms"
        )
        await asyncio.sleep(6.0)  # All leases have been renewed by then.

    def _is_right(self, truth: dict[str, dict[str, str]]) -> bool:
        tiers = self._view.chooser._tiers
        num_held = sum(len(holders) for holders in tiers.values())
        return num_held == sum(map(len, truth.values())) and all(
            tiers.get(adapter, {}).get(replica) == tier
            for replica, held in truth.items()
            for adapter, tier in held.items()
        )

    async def _follow(self) -> None:
        """Polls the directory as cluster/routing/router.py does."""
        directory = get_or_create(self._place)
        while True:
            try:
                self._view.apply(await directory.ask(RoutesCall(self._view.epoch, self._view.version)))
            except OSError:  # The directory was killed.
                await asyncio.sleep(RETRY_S)
                continue
            self._num_polls += 1
            self._applied.set()

    def _process(self) -> psutil.Process:
        """Returns the directory's process. Ray's workers are children of this process's raylet."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (
                    any("DirectoryActor" in part for part in process.cmdline())
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    return process
        raise LookupError("no directory is running")

    def _memory(self) -> str:
        return f"the directory uses {self._process().memory_info().rss / 2**20:.0f} MB"


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _quantiles(seconds: list[float]) -> str:
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e3
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"


if __name__ == "__main__":
    main()
