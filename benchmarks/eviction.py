"""What the CPU tier reads again because it had to let go of it: the product's own CPUTier beside LRU, on traces.

    python benchmarks/eviction.py

A request for an adapter that is not in the tier reads it. Adapters are asked for by Zipf's law; ranks are 8 to 64, and
so are their bytes. "scan": every 3000 requests, 300 names come once each and never again. "shift": every quarter of the
trace others are the popular ones.
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
    """Of a request, on average."""

    count: float
    rank: float  # bytes, in those of one rank


def trace(kind: str, alpha: float, length: int, seed: int) -> Iterator[int]:
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, NUM_ADAPTERS + 1) ** alpha
    drawn = random.choice(NUM_ADAPTERS, length, p=weights / weights.sum())
    names, cold = random.permutation(NUM_ADAPTERS), NUM_ADAPTERS
    for at, one in enumerate(drawn):
        if kind == "scan" and at % SCAN_EVERY == SCAN_EVERY - 1:
            yield from range(cold, cold + SCAN)
            cold += SCAN
        if kind == "shift" and at % (length // 4) == 0:
            names = random.permutation(NUM_ADAPTERS)
        yield int(names[one])


def rank_of(adapter: int) -> int:
    return RANKS[adapter * 2654435761 % 2**32 % len(RANKS)]


def lru_reads(requests: Sequence[int], capacity: int) -> Reads:
    held: OrderedDict[int, None] = OrderedDict()
    read: list[int] = []
    for one in requests:
        if one not in held:
            read.append(one)
            if len(held) == capacity:
                held.popitem(last=False)
        held[one] = None
        held.move_to_end(one)
    return _reads(read, len(requests))


def tier_reads(requests: Sequence[int], capacity: int) -> Reads:
    demand = Demand(capacity)
    tier = CPUTier(capacity, demand)
    read: list[int] = []
    for one in requests:
        demand.count(str(one))
        if str(one) in tier:
            tier.touch(str(one))
        else:
            read.append(one)
            tier.add(_adapter(one), lambda _: 0)
    return _reads(read, len(requests))


def _adapter(one: int) -> PackedAdapter:
    info = AdapterInfo(str(one), rank_of(one), rank_of(one), [])
    return PackedAdapter(info, NOTHING, torch.float32, AdapterTable.empty(0), LoadTimes(0, 0, 0))


def _reads(read: list[int], num_requests: int) -> Reads:
    return Reads(len(read) / num_requests, sum(rank_of(one) for one in read) / num_requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print("reads a request and ranks read a request; in brackets beside LRU")
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
                    f"{kind:6} alpha {alpha} {capacity:4} places: LRU {lru_count:.3f} {lru_rank:6.2f}  "
                    f"ours {count:.3f} ({count / lru_count:.2f}) {rank:6.2f} ({rank / lru_rank:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
