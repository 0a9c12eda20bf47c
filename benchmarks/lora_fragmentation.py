"""Simulates how much of the memory for adapters is of use when adapters of mixed ranks come and go. It needs no GPU.

    python benchmarks/lora_fragmentation.py

The memory has room for a number of adapters of rank 64 on every module of an 8B Llama in bf16. Adapters of S-LoRA's
ranks (8, 16, 32 and 64, equally many) arrive one after another, and others leave for them. Three ways to divide the
memory are compared:

- slots: each adapter takes the bytes of the largest
- pages: an adapter takes whole pages of equal size, as large as the largest matrix, or of 8 MiB, and no matrix crosses
  the end of a page
- ranges: lora_memory.py, which the engine uses

The figures are the resident adapters compared with slots, the share of the memory that adapters fill, and the mean and
the largest number of places that one adapter lies in. Each place is at least one copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from typing import Protocol

from lorafleet.workers.slots.extra_block import aligned
from lorafleet.workers.slots.lora_memory import Extent, LoRAMemory

RANKS = 8, 16, 32, 64  # S-LoRA's, arXiv 2311.03285
LAYERS, HIDDEN, KV, INNER = 32, 4096, 1024, 14336  # of an 8B Llama
# What A and B of each packed linear have for each rank. The first number is A's.
ATTENTION = ((3 * HIDDEN, HIDDEN, KV, KV), (HIDDEN, HIDDEN))
MLP = ((2 * HIDDEN, INNER, INNER), (INNER, HIDDEN))
TARGETS = {"all": ATTENTION + MLP, "attention": ATTENTION, "query and value": ((2 * HIDDEN, HIDDEN, KV),)}
MIXES = (("all",), ("attention",), ("all", "attention", "query and value"))
NUM_ARRIVALS, WARM_UP = 4000, 500


class Divided(Protocol):
    """A division of the memory. A place is what an adapter takes of it."""

    def place(self, cuts: Sequence[int]) -> int | None:
        """Takes room for an adapter, whose matrices begin at these bytes. Returns the number of ranges that it lies in,
        or None if there is no room."""

    def free_oldest(self, index: int) -> None:
        """Frees the room of one adapter; 0 is the one that has been here longest."""


@dataclass
class Slots:
    num_slots: int
    num_used: int = 0

    def place(self, cuts: Sequence[int]) -> int | None:  # noqa: ARG002  # as Divided
        if self.num_used == self.num_slots:
            return None
        self.num_used += 1
        return 1

    def free_oldest(self, index: int) -> None:  # noqa: ARG002  # as Divided
        self.num_used -= 1


@dataclass
class Pages:
    page_bytes: int
    num_free: int
    held: list[int] = field(default_factory=list)

    def place(self, cuts: Sequence[int]) -> int | None:
        num_pages, room = 0, 0
        for begin, end in pairwise(cuts):
            if end - begin > room:
                num_pages, room = num_pages + 1, self.page_bytes
            room -= end - begin
        if num_pages > self.num_free:
            return None
        self.num_free -= num_pages
        self.held.append(num_pages)
        return num_pages

    def free_oldest(self, index: int) -> None:
        self.num_free += self.held.pop(index)


@dataclass
class Ranges:
    memory: LoRAMemory
    held: list[list[Extent]] = field(default_factory=list)

    def place(self, cuts: Sequence[int]) -> int | None:
        extents = self.memory.find(cuts)
        if extents is None:
            return None
        self.memory.take(extents)
        self.held.append(extents)
        return len(extents)

    def free_oldest(self, index: int) -> None:
        self.memory.give_back(self.held.pop(index))


@dataclass(frozen=True)
class Result:
    residents: float  # Mean number of adapters.
    filled: float  # Mean share of the memory.
    places: float  # Mean number for each adapter.
    most_places: int


def cuts_of(rank: int, targets: str) -> list[int]:
    sizes = [aligned(numbers * rank * 2) for _ in range(LAYERS) for linear in TARGETS[targets] for numbers in linear]
    return [0, *accumulate(sizes)]


def simulate(divided: Divided, num_bytes: int, mix: Sequence[str], seed: int) -> Result:
    """Runs one division of the memory. Those that leave are drawn from the older half, since the newest are in use."""
    random = Random(seed)
    kinds = [cuts_of(rank, targets) for rank in RANKS for targets in mix]
    held: list[int] = []
    residents, filled, places = [], [], []
    for number in range(NUM_ARRIVALS):
        cuts = random.choice(kinds)
        while (parts := divided.place(cuts)) is None:
            leaving = random.randrange(len(held) // 2 + 1)
            divided.free_oldest(leaving)
            del held[leaving]
        held.append(cuts[-1])
        if number >= WARM_UP:
            residents.append(len(held))
            filled.append(sum(held) / num_bytes)
            places.append(parts)
    return Result(statistics.mean(residents), statistics.mean(filled), statistics.mean(places), max(places))


def divisions(num_largest: int, largest: Sequence[int]) -> dict[str, Callable[[], Divided]]:
    num_bytes = num_largest * largest[-1]
    widest = max(end - begin for begin, end in pairwise(largest))
    return {
        "slots": lambda: Slots(num_largest),
        "pages of the largest matrix": lambda: Pages(widest, num_bytes // widest),
        "pages of 8 MiB": lambda: Pages(8 << 20, num_bytes // (8 << 20)),
        "ranges": lambda: Ranges(LoRAMemory(num_bytes)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, nargs="+", default=[8, 32], help="Adapters of rank 64 with room.")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    largest = cuts_of(max(RANKS), "all")
    print("| room | modules | division | resident, x slots | filled | places of an adapter, mean and most |")
    print("|---|---|---|---|---|---|")
    for num_largest in args.largest:
        for mix in MIXES:
            for name, make in divisions(num_largest, largest).items():
                found = simulate(make(), num_largest * largest[-1], mix, args.seed)
                times, places = found.residents / num_largest, f"{found.places:.1f}, {found.most_places}"
                row = (num_largest, "; ".join(mix), name, f"{times:.2f}", f"{found.filled:.1%}", places)
                print("|", " | ".join(map(str, row)), "|")


if __name__ == "__main__":
    main()
