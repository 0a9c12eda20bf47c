"""Measures how often the CPU tier reloads evicted adapters: the product's own CPUTier against LRU, on synthetic traces.

    python benchmarks/eviction.py

A request for an adapter that is not in the tier reads it. Adapters are requested by Zipf's law. Ranks are 8 to 64, and
the bytes of an adapter are proportional to its rank. In "scan", 300 adapters are requested once each after every 3000
requests and never again. In "shift", other adapters become popular in every quarter of the trace.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lorafleet.kernels.lora.packed_lora import AdapterTable
from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.workers.slots.cpu_tier import CPUTier
from lorafleet.workers.slots.eviction import Demand
from lorafleet.workers.slots.packed_adapter import LoadTimes, PackedAdapter

NUM_ADAPTERS = 1000
RANKS = (8, 8, 16, 32, 64)
SCAN_EVERY, SCAN = 3000, 300
NOTHING = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Reads:
    """Average reads per request."""

    count: float
    rank: float  # Bytes that are read, in units of the bytes of one rank.


def trace(kind: str, alpha: float, length: int, seed: int) -> Iterator[int]:
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_ADAPTERS + 1) ** alpha
    drawn = random.choice(NUM_ADAPTERS, length, p=weights / weights.sum())
    names, cold = random.permutation(NUM_ADAPTERS), NUM_ADAPTERS
    for index, popularity_rank in enumerate(drawn):
        if kind == "scan" and index % SCAN_EVERY == SCAN_EVERY - 1:
            yield from range(cold, cold + SCAN)
            cold += SCAN
        if kind == "shift" and index % (length // 4) == 0:
            names = random.permutation(NUM_ADAPTERS)
        yield int(names[popularity_rank])


def rank_of(adapter: int) -> int:
    return RANKS[adapter * 2654435761 % 2**32 % len(RANKS)]


def lru_reads(requests: Sequence[int], capacity: int) -> Reads:
    held: OrderedDict[int, None] = OrderedDict()
    read: list[int] = []
    for adapter in requests:
        if adapter not in held:
            read.append(adapter)
            if len(held) == capacity:
                held.popitem(last=False)
        held[adapter] = None
        held.move_to_end(adapter)
    return _reads(read, len(requests))


def tier_reads(requests: Sequence[int], capacity: int) -> Reads:
    demand = Demand(capacity)
    tier = CPUTier(capacity, demand)
    read: list[int] = []
    for adapter in requests:
        demand.count(str(adapter))
        if str(adapter) in tier:
            tier.touch(str(adapter))
        else:
            read.append(adapter)
            tier.add(_adapter(adapter), lambda _: 0)
    return _reads(read, len(requests))


def _adapter(adapter: int) -> PackedAdapter:
    info = AdapterInfo(str(adapter), rank_of(adapter), rank_of(adapter), [])
    return PackedAdapter(info, NOTHING, torch.float32, AdapterTable.empty(0), LoadTimes(0, 0, 0))


def _reads(adapters: list[int], num_requests: int) -> Reads:
    return Reads(len(adapters) / num_requests, sum(rank_of(adapter) for adapter in adapters) / num_requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print("reads per request and ranks read per request; the ratio to LRU is in parentheses")
    for kind in ("zipf", "scan", "shift"):
        for alpha in (0.8, 1.1):
            for capacity in (32, 128):
                pairs = []
                for seed in range(args.seeds):
                    requests = list(trace(kind, alpha, args.length, seed))
                    pairs.append((lru_reads(requests, capacity), tier_reads(requests, capacity)))
                lru_count, count = (np.mean([pair[i].count for pair in pairs]) for i in (0, 1))
                lru_rank, rank = (np.mean([pair[i].rank for pair in pairs]) for i in (0, 1))
                print(
                    f"{kind:6} alpha {alpha} {capacity:4} entries: LRU {lru_count:.3f} {lru_rank:6.2f}  "
                    f"ours {count:.3f} ({count / lru_count:.2f}) {rank:6.2f} ({rank / lru_rank:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
