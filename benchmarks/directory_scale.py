"""Measures the directory and a router at size: 1,000 replicas with 160 adapters each, and 1,000,000 adapters in the
catalogue.

It writes the catalogue's log as a directory does, change by change, and rebuilds the directory from it. Then it drives
the directory and a router's table in one process. benchmarks/directory_cluster.py measures what Ray and the network
add.

    python benchmarks/directory_scale.py [--replicas 1000] [--adapters 1000000] [--log FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_log import CatalogueLog
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Share, VersionRecord, moved
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.residency import Report, Routes, RouteView
from lorafleet.cluster.routing.routing import ReplicaChooser, ReplicaLoad, Tier

SLOTS, IN_CPU = 32, 128
NUM_DECISIONS = 20_000
NUM_CHANGES = 500


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=1_000_000)
    parser.add_argument("--log", type=Path, help="folder of the catalogue, which is kept and reused by later runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="directory-scale-") as folder:
        log = args.log or Path(folder)
        in_own_process(write_log, log, args.adapters)
        asyncio.run(_measure(log, args.replicas, args.adapters))


def in_own_process(work: object, *args: object) -> None:
    """Runs the function in a process of its own, so that its memory is not counted in this one."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)  # type: ignore[arg-type]  # It is callable.
    process.start()
    process.join()
    assert process.exitcode == 0


def digest_of(number: int) -> str:
    return f"{number:064x}"


def write_log(folder: Path, num_adapters: int) -> None:
    log = CatalogueLog(FolderStore(folder))
    there = len(log.load())
    slowest_s, started = 0.0, time.perf_counter()
    for number in range(there, num_adapters):
        entry, before = _adapter(number), time.perf_counter()
        assert log.append(entry) == []
        slowest_s = max(slowest_s, time.perf_counter() - before)
    if there < num_adapters:
        took_s = time.perf_counter() - started
        print(
            f"log: {num_adapters - there} changes written in {took_s:.0f} s, the slowest, which merged the log, in "
            f"{slowest_s:.2f}; writer's memory {_memory()}"
        )


def _adapter(number: int) -> AdapterRecord:
    source = f"s3://trainers/team-{number % 1000}/adapter-{number}"
    version = VersionRecord(
        1, digest_of(number), source, 16, 84_000_000, 1.7e9 + number, base_model_name="meta/Llama-3.1-8B"
    )
    adapter = AdapterRecord(f"adapter-{number}", (version,), tenant=f"team-{number % 1000}")
    return moved(adapter, adapter.name, (Share(1, 1.0),), 1.7e9 + number)


async def _measure(log: Path, num_replicas: int, num_adapters: int) -> None:
    rng = np.random.default_rng(0)
    replicas = [f"replica-{i}" for i in range(num_replicas)]
    print(f"memory before: {_memory()}")
    started = time.perf_counter()
    directory = AdapterDirectory(Catalogue(FolderStore(log)))
    await directory.load()
    took_s = time.perf_counter() - started
    print(f"rebuilt from the log, {len(directory.catalogue.state.adapters)} adapters: {took_s:.2f} s, {_memory()}")

    for replica in replicas:
        directory.leases.join(replica, "", [], [], ready=True)
    started = time.perf_counter()
    for replica in replicas:
        held = (num_adapters * rng.power(0.3, SLOTS + IN_CPU)).astype(int).tolist()
        tiers: dict[str, Tier | None] = {digest_of(i): "gpu" if n < SLOTS else "cpu" for n, i in enumerate(held)}
        assert directory.routers.accept(_received(Report(replica, 1, True, tiers, _load(rng))))
    print(f"full reports of all replicas: {time.perf_counter() - started:.2f} s, {_memory()}")

    view = RouteView(ReplicaChooser(seed=0))
    view.chooser.set_replicas(replicas)
    started = time.perf_counter()
    sent = msgspec.msgpack.encode(await directory.routers.routes("", -1))
    view.apply(msgspec.msgpack.decode(sent, type=Routes))
    print(f"a router's snapshot: {len(sent) / 1e6:.1f} MB, {time.perf_counter() - started:.2f} s, then {_memory()}")

    for label, alpha in (("S-LoRA's alpha .3", 0.3), ("uniform: nearly all cold", 1.0)):
        asked = (num_adapters * rng.power(alpha, NUM_DECISIONS)).astype(int).tolist()
        print(f"decision, {label}: {_quantiles([_decide(view, f'adapter-{i}') for i in asked])}")

    latencies = [
        await _change(directory, view, replica, digest_of(num_adapters - 1 - n))
        for n, replica in enumerate(replicas[:NUM_CHANGES])
    ]
    print(f"a change from its report to the router's table: {_quantiles(latencies)}")


def _received(report: Report) -> Report:
    """Returns the report as if it came from another process, with strings of its own."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=Report)


def _load(rng: np.random.Generator) -> ReplicaLoad:
    running, waiting = rng.integers(0, 200), rng.integers(0, 20)
    return ReplicaLoad(int(running), int(waiting), int(waiting) * 260, 0, int(rng.integers(-3, 10)))


def _decide(view: RouteView, name: str) -> float:
    started = time.perf_counter()
    adapter = view.adapter(name)
    chosen = view.chooser.rank(adapter)[0]
    view.chooser.sent(adapter, chosen, 260)
    return time.perf_counter() - started


async def _change(directory: AdapterDirectory, view: RouteView, replica: str, digest: str) -> float:
    report = Report(replica, 2, False, {digest: "gpu"}, ReplicaLoad())
    started = time.perf_counter()
    assert directory.routers.accept(report)
    routes = await directory.routers.routes(view.epoch, view.version)
    view.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(routes), type=Routes))
    return time.perf_counter() - started


def _quantiles(seconds: list[float]) -> str:
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e6
    return f"p50 {p50:.1f} us, p99 {p99:.1f} us"


def _memory() -> str:
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{psutil.Process().memory_info().rss / 2**20:.0f} MB (at most {peak_mb:.0f})"


if __name__ == "__main__":
    main()
