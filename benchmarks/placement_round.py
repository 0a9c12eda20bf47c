"""Measures how long a placement round blocks the directory's event loop, with many adapters of three sizes, all active.

It runs the rounds as the directory does, with a task beside them that wakes every millisecond and records its delay.

    python benchmarks/placement_round.py [--replicas 1000] [--adapters 20000]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from lorafleet.cluster.directory.placer import ROUND_S, Placer
from lorafleet.cluster.directory.residency import Report, Residency
from lorafleet.cluster.directory.slices import in_slices
from lorafleet.cluster.routing.routing import ReplicaLoad

SIZES = [(84_000_000 * rank // 16, rank) for rank in (16, 32, 64)]
PULSE_S = 0.001
NUM_ROUNDS = 4


async def measure(num_replicas: int, num_adapters: int) -> None:
    residency = Residency("e")
    replicas = [f"replica-{i}" for i in range(num_replicas)]
    digests = [f"{i:064x}" for i in range(num_adapters)]
    sizes = dict(zip(digests, random.Random(0).choices(SIZES, k=num_adapters), strict=True))
    placer = Placer(residency, sizes.get, dict, lambda _replica, _adapter: None, None)
    for number in range(NUM_ROUNDS):
        demand = {digest: 1_000_000 // (i + 1) + 50 for i, digest in enumerate(digests)}
        for replica in replicas:
            tokens, demand = demand, {}
            residency.accept(Report(replica, number + 1, True, {}, ReplicaLoad(), tokens, 128))
        late_s = [0.0]
        pulse = asyncio.create_task(_pulse(late_s))
        await asyncio.sleep(0)
        started, worked = time.perf_counter(), time.process_time()
        await in_slices(placer.round(number * ROUND_S))
        took, worked = time.perf_counter() - started, time.process_time() - worked
        pulse.cancel()
        print(f"round {number + 1}: {took:.2f} s, {worked:.2f} s of work, loop blocked for {max(late_s) * 1e3:.1f} ms")


async def _pulse(late_s: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(PULSE_S)
        late_s.append(time.perf_counter() - before - PULSE_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=20_000)
    args = parser.parse_args()
    asyncio.run(measure(args.replicas, args.adapters))


if __name__ == "__main__":
    main()
