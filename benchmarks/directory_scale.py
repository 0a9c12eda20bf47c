"""The directory and a router at size: 1,000 replicas that hold 160 adapters each, 1,000,000 adapters with a name each.

In one process, with the product's Residency, RouteView and ReplicaChooser; Ray's calls are not in the figures, and the
catalogue below the directory is not in the memory.

python benchmarks/directory_scale.py [--replicas 1000] [--adapters 1000000]
"""

from __future__ import annotations

import argparse
import resource
import time

import msgspec
import numpy as np

from lorafleet.cluster.residency import Report, Residency, Routes, RouteView
from lorafleet.cluster.routing import ReplicaChooser, ReplicaLoad, Tier

SLOTS, IN_CPU = 32, 128
NUM_DECISIONS = 20_000
NUM_CHANGES = 500


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=1_000_000)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    digests = [f"{i:064x}" for i in range(args.adapters)]
    replicas = [f"replica-{i}" for i in range(args.replicas)]
    before_mb = _peak_mb()

    started = time.perf_counter()
    residency = Residency("e")
    for i, digest in enumerate(digests):
        residency.set_name(f"adapter-{i}", (digest,))
    print(f"names told to the directory: {time.perf_counter() - started:.1f} s")

    started = time.perf_counter()
    for replica in replicas:
        held = (args.adapters * rng.power(0.3, SLOTS + IN_CPU)).astype(int).tolist()
        tiers: dict[str, Tier | None] = {digests[i]: "gpu" if n < SLOTS else "cpu" for n, i in enumerate(held)}
        residency.accept(Report(replica, 1, True, tiers, _load(rng)))
    print(f"full reports of all replicas: {time.perf_counter() - started:.2f} s")
    print(f"directory: {_peak_mb() - before_mb:.0f} MB beside the digests themselves")

    view = RouteView(ReplicaChooser(seed=0))
    view.chooser.set_replicas(replicas)
    started = time.perf_counter()
    sent = msgspec.msgpack.encode(residency.since("", -1))
    view.apply(msgspec.msgpack.decode(sent, type=Routes))
    print(f"a router's snapshot: {len(sent) / 1e6:.1f} MB, {time.perf_counter() - started:.2f} s")

    for label, alpha in (("S-LoRA's alpha .3", 0.3), ("all alike: nearly all cold", 1.0)):
        asked = (args.adapters * rng.power(alpha, NUM_DECISIONS)).astype(int).tolist()
        print(f"decision, {label}: {_quantiles([_decide(view, f'adapter-{i}') for i in asked])}")

    latencies = [
        _change(residency, view, replica, digests[-1 - n], 2) for n, replica in enumerate(replicas[:NUM_CHANGES])
    ]
    print(f"a change from its report to the router's table: {_quantiles(latencies)}")


def _load(rng: np.random.Generator) -> ReplicaLoad:
    running, waiting = rng.integers(0, 200), rng.integers(0, 20)
    return ReplicaLoad(int(running), int(waiting), int(waiting) * 260, 0, int(rng.integers(-3, 10)))


def _decide(view: RouteView, name: str) -> float:
    started = time.perf_counter()
    adapter = view.adapter(name)
    chosen = view.chooser.rank(adapter)[0]
    view.chooser.sent(adapter, chosen, 260)
    return time.perf_counter() - started


def _change(residency: Residency, view: RouteView, replica: str, digest: str, sequence: int) -> float:
    report = Report(replica, sequence, False, {digest: "gpu"}, ReplicaLoad())
    started = time.perf_counter()
    assert residency.accept(report)
    view.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(residency.since("e", view.version)), type=Routes))
    return time.perf_counter() - started


def _quantiles(seconds: list[float]) -> str:
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e6
    return f"p50 {p50:.1f} us, p99 {p99:.1f} us"


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
