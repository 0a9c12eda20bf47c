"""Computes which p99 TTFT no rule for placement can beat, for the workloads of benchmarks/placement.py.

A request whose adapter is in no replica's memory waits for a read, whoever routes it. The bounds count only reads that
cannot be avoided. Apart from the last bound, disks are idle, and prompts wait for nothing else:

- first: each adapter is read for its first request, and never again.
- Belady: the memories of all replicas together are one cache, which evicts by Belady's rule and reads nothing ahead.
- ahead: the adapters that this run requests most are in memory from the start, as many as fit. The others are read each
  time. Reading ahead reaches this if it knows all rates, but not when a request comes.
- queued: as "first", but the reads of all requests wait for one of the replicas' disks, in their order. It is no strict
  bound, since another order may have a lower p99.

    python benchmarks/placement_bound.py [--seeds 10] [--ratios 16] [--sources disk s3 neighbor]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean

import numpy as np

import placement_workloads
from placement import CPU_ADAPTERS, DURATION_S, NUM_REPLICAS, NUM_SLOTS, RATES, RATIOS, WARM_UP_S
from placement_workloads import Load
from simulated_replica import CHUNK, FILL_BYTES_S, PREFILL_TOKENS_S, RANK_BYTES, STEP_S, read_s
from simulated_storage import DIGEST_BYTES_S, LINK_BYTES_S, NEAR_BASE_S, S3_BASE_S, S3_BYTES_S
from slora_workload import Arrival

PLACES = NUM_REPLICAS * (CPU_ADAPTERS + NUM_SLOTS)  # Adapters in all memories, if none of them is held twice.


SOURCES: dict[str, Callable[[int], float]] = {  # Seconds until an adapter of so many bytes is in host memory.
    "disk": partial(read_s, is_new=True),
    "s3": lambda size: S3_BASE_S + size / S3_BYTES_S + size / DIGEST_BYTES_S + read_s(size, is_new=False),
    "neighbor": lambda size: NEAR_BASE_S + size / LINK_BYTES_S + size / DIGEST_BYTES_S + read_s(size, is_new=False),
}


def first(adapters: Sequence[int]) -> list[bool]:
    """Returns for each request whether it is its adapter's first."""
    seen: set[int] = set()
    missed = []
    for adapter in adapters:
        missed.append(adapter not in seen)
        seen.add(adapter)
    return missed


def belady(adapters: Sequence[int], places: int = PLACES) -> list[bool]:
    """Returns for each request whether it misses a cache that evicts what is needed latest."""
    next_use: list[float] = [math.inf] * len(adapters)
    later: dict[int, int] = {}
    for index in range(len(adapters) - 1, -1, -1):
        next_use[index] = later.get(adapters[index], math.inf)
        later[adapters[index]] = index
    held: dict[int, float] = {}
    latest: list[tuple[float, int]] = []
    missed = []
    for index, adapter in enumerate(adapters):
        missed.append(adapter not in held)
        held[adapter] = next_use[index]
        heapq.heappush(latest, (-next_use[index], adapter))
        while len(held) > places:
            use, victim = heapq.heappop(latest)
            if held.get(victim) == -use:
                del held[victim]
    return missed


def ahead(adapters: Sequence[int], places: int = PLACES) -> list[bool]:
    """Returns for each request whether its adapter is not among the most requested ones."""
    held = {adapter for adapter, _ in Counter(adapters).most_common(places)}
    return [adapter not in held for adapter in adapters]


BOUNDS: dict[str, Callable[[Sequence[int]], list[bool]]] = {"first": first, "Belady": belady, "ahead": ahead}


def p99_s(
    arrivals: Sequence[Arrival],
    ranks: Sequence[int],
    missed: Sequence[bool],
    read_s: Callable[[int], float],
    wait_s: Iterable[float] = itertools.repeat(0.0),
) -> float:
    """Returns the p99 of the TTFT if the requests that miss wait for a read, which begins after `wait_s`."""
    ttft_s = []
    for arrival, misses, late_s in zip(arrivals, missed, wait_s, strict=False):
        if arrival.at_s >= WARM_UP_S and arrival.adapter is not None:
            size = ranks[arrival.adapter] * RANK_BYTES
            chunks = math.ceil(arrival.num_input / CHUNK)
            prefill_s = arrival.num_input / PREFILL_TOKENS_S + chunks * STEP_S[0]
            ttft_s.append(late_s + prefill_s + misses * (read_s(size) + size / FILL_BYTES_S))
    return float(np.quantile(ttft_s, 0.99))


def queued_p99_s(
    arrivals: Sequence[Arrival], ranks: Sequence[int], missed: Sequence[bool], read_s: Callable[[int], float]
) -> float:
    """Returns the p99 as p99_s does, but with one queue for the disks of all replicas."""
    free_s = [0.0] * NUM_REPLICAS
    wait_s: list[float] = []
    for arrival, misses in zip(arrivals, missed, strict=True):
        if misses and arrival.adapter is not None:
            starts_s = max(arrival.at_s, heapq.heappop(free_s))
            heapq.heappush(free_s, starts_s + read_s(ranks[arrival.adapter] * RANK_BYTES))
            late_s = starts_s - arrival.at_s
        wait_s.append(late_s if misses else 0.0)
    return p99_s(arrivals, ranks, missed, read_s, wait_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--ratios", nargs="+", type=int, default=[16], choices=RATIOS)
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES)
    args = parser.parse_args()
    for workload, rates in RATES.items():
        for ratio in args.ratios:
            adapters = ratio * NUM_REPLICAS * NUM_SLOTS
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            loads = [Load(workload, rates[RATIOS.index(ratio)], DURATION_S, adapters, seed) for seed in seeds]
            drawn = [(placement_workloads.draw(load), placement_workloads.ranks(load)) for load in loads]
            texts = []
            for bound, missed_by in [*BOUNDS.items(), ("queued", first)]:
                p99 = queued_p99_s if bound == "queued" else p99_s
                missed = [missed_by([a.adapter for a in arrivals if a.adapter is not None]) for arrivals, _ in drawn]
                late = [
                    fmean(miss for a, miss in zip(arrivals, misses, strict=True) if a.at_s >= WARM_UP_S)
                    for (arrivals, _), misses in zip(drawn, missed, strict=True)
                ]
                bounds_ms = [
                    1e3 * fmean(p99(*run, misses, SOURCES[source]) for run, misses in zip(drawn, missed, strict=True))
                    for source in (args.sources if p99 is p99_s else ["disk"])  # Fetches do not wait for each other.
                ]
                texts.append(f"{bound} {fmean(late):.3f}: {', '.join(f'{value:.0f}' for value in bounds_ms)}")
            print(f"{workload}, {ratio}, {rates[RATIOS.index(ratio)]}/s: {' | '.join(texts)} ms", flush=True)


if __name__ == "__main__":
    main()
