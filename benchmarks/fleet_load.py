"""The loads of benchmarks/fleet.py: which calls each workload has, and how large a run is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import placement_workloads
from conversations import Conversations
from conversations import draw as draw_conversations
from http_load import Call
from placement_workloads import RANKS, WORKLOADS, Load
from simulated_replica import RANK_BYTES, read_s

SLORA, CONVERSATIONS, SATURATION, BASE = "S-LoRA, alpha .3", "conversations", "saturation", "saturation, base"
ALONE = {f"{workload}, one replica": workload for workload in (SATURATION, BASE)}
LOOPS = (SATURATION, BASE, *ALONE)
KNOWN = (*WORKLOADS, CONVERSATIONS, *LOOPS)
MAX_RATE = 10_000
MORE_CALLS = 4  # A closed loop gets so many times the calls of a workload, so that it never runs out of them.
WARM_UP_SEED = 1000


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a run; the defaults of both devices differ."""

    replicas: tuple[int, ...]
    adapters: int
    max_loras: int
    max_cpu_loras: int
    lora_memory_gib: float | None  # Memory for adapters on a GPU; None is the server's default.
    rate: float  # Requests per second and replica, as the mean over a workload. Those with peaks exceed it.
    duration_s: float
    warm_up_s: float  # Time of the calls that are not counted.
    longest: int  # Prompts and answers are cut to this many tokens.
    token_ids: tuple[int, int]
    streams: int  # Number of streams of the closed loop for each replica.
    turn_tokens: int  # Mean tokens of a question, and of an answer, in conversations.
    seed: int


@dataclass(frozen=True, slots=True)
class Stage:
    """A workload, and how much of it there is."""

    workload: str
    rate: float | None = None  # Requests per second and replica; None is that of the run.
    num_rules: int | None = None  # The number of rules that get it, the first ones; None is all.

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Reads WORKLOAD[@RATE][:NUMBER OF RULES]. Raises ValueError."""
        rest, _, count = text.partition(":")
        workload, _, rate = rest.partition("@")
        if workload not in KNOWN:
            raise ValueError(f"{workload!r} is no workload")
        stage = cls(workload, float(rate) if rate else None, int(count) if count else None)
        if (stage.rate is not None and not 0 < stage.rate <= MAX_RATE) or stage.num_rules == 0:
            raise ValueError(f"a rate must be above 0 and at most {MAX_RATE}, and a number of rules at least 1")
        return stage

    def is_for(self, index: int) -> bool:
        """Returns whether the rule with this index gets it."""
        return self.num_rules is None or index < self.num_rules


SIZES = {
    "cpu": Size((2,), 24, 4, 8, None, 1.5, 20.0, 4.0, 48, (10, 250), 4, 24, 0),
    # The memory holds 34 adapters of mean rank, so there are four adapters for each place on four GPUs.
    "cuda": Size((1, 2, 4), 512, 32, 128, 5.0, 18.0, 120.0, 20.0, 512, (10, 128_000), 128, 256, 0),
}


def load_of(workload: str, size: Size, replicas: int) -> Load:
    """Returns the parameters of one of WORKLOADS, or of the calls of a closed loop."""
    if workload in LOOPS:
        return load_of(SLORA, replace(size, rate=MORE_CALLS * size.rate), replicas)
    return Load(workload, size.rate * replicas, size.duration_s, size.adapters, size.seed)


def warm_up_size(size: Size) -> Size:
    return replace(size, duration_s=size.warm_up_s, seed=size.seed + WARM_UP_SEED)


def draw_calls(workload: str, size: Size, replicas: int) -> list[Call]:
    names = [f"a{number}" for number in range(size.adapters)]
    rate = size.rate * replicas
    if workload == CONVERSATIONS:
        turns = 6
        return draw_conversations(
            Conversations(
                rate / turns,
                size.duration_s,
                names,
                turns,
                2 * size.turn_tokens,
                size.turn_tokens,
                size.duration_s / 20,
                size.token_ids,
                size.seed,
            )
        )
    arrivals = placement_workloads.draw(load_of(workload, size, replicas))
    random = np.random.default_rng([size.seed, 13])
    return [
        Call(
            arrival.at_s,
            "base" if arrival.adapter is None or ALONE.get(workload, workload) == BASE else names[arrival.adapter],
            random.integers(*size.token_ids, min(arrival.num_input, size.longest)).tolist(),
            min(arrival.num_output, size.longest),
        )
        for arrival in arrivals
    ]


def first_pass(size: Size, replicas: int) -> tuple[int, float]:
    """Returns the bytes that a server reads for each adapter's first request, and how long the simulation takes for
    them if the replicas read equal parts."""
    sizes = [rank * RANK_BYTES for rank in placement_workloads.ranks(Load("", 1.0, 1.0, size.adapters, size.seed))]
    return sum(sizes), sum(read_s(one, is_new=True) for one in sizes) / replicas


def lora_bytes(size: Size) -> int:
    """Returns the bytes of the memory for adapters of a GPU."""
    if size.lora_memory_gib is None:
        return size.max_loras * max(RANKS) * RANK_BYTES
    return int(size.lora_memory_gib * 2**30)
