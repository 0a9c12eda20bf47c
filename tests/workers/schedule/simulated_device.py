"""A device whose steps take the time of a formula, and clients that send their next request when one is answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.attention.prompt_tiles import best_parts, walk_of
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from tests.workers.schedule.stepped_scheduler import Events, SteppedScheduler

GRAPH_SIZES = (16, 32, 64, 128, 192, 256, *range(384, 1024, 128), *range(1024, 2049, 256))

NUM_LAYERS, KEY_S = 32, 16.6e-9  # a tile of 128 queries takes so long for a key, in one layer


def shape_of(chunks: list[Chunk]) -> StepShape:
    """The shape that StepPlan has for a step, before it is launched."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    if all(chunk.num_tokens == 1 for chunk in chunks):
        return StepShape("decode", len(chunks), num_tokens, 0)
    ends = [(chunk.num_tokens, chunk.sequence.num_computed + chunk.num_tokens) for chunk in chunks]
    prompts = tuple((count, end) for count, end in ends if count > 1)
    decoded = sum(end for count, end in ends if count == 1)
    return StepShape("prefill", len(chunks), num_tokens, 0, decoded, prompts)


def num_pairs(shape: StepShape) -> int:
    """Pairs of a prompt's token and a position that it attends to."""
    return sum(count * end - count * (count - 1) // 2 for count, end in shape.prompts)


class Device(Protocol):
    def seconds(self, chunks: list[Chunk]) -> float: ...


@dataclass(frozen=True)
class H200:
    """About an 8B model in bf16: weights are read or multiplied, keys and values are read, prompts attend."""

    speed: float = 1.0
    noise: Callable[[], float] = lambda: 1.0

    def seconds(self, chunks: list[Chunk]) -> float:
        shape = shape_of(chunks)
        positions = sum(chunk.sequence.num_computed + chunk.num_tokens for chunk in chunks)
        linears = (4.0e-3**3 + (21.7e-6 * computed_tokens(shape)) ** 3) ** (1 / 3)
        attention = 36e-9 * positions + 1.2e-9 * num_pairs(shape)
        return (5e-4 + 2e-6 * len(chunks) + linears + attention) * self.noise() / self.speed


def computed_tokens(shape: StepShape) -> int:
    if shape.kind == "decode":
        return shape.num_tokens
    return next((size for size in GRAPH_SIZES if size >= shape.num_tokens), shape.num_tokens)


@dataclass(frozen=True)
class H100:
    """The same model, whose prompts' attention takes whole tiles of queries."""

    noise: Callable[[], float] = lambda: 1.0
    is_divided: bool = True  # Whether the keys of long contexts are divided among programs.

    def seconds(self, chunks: list[Chunk]) -> float:
        shape = shape_of(chunks)
        linears = (5.3e-3**3 + (22e-6 * computed_tokens(shape)) ** 3) ** (1 / 3)
        decoded = (
            sum(chunk.sequence.num_computed for chunk in chunks) if shape.kind == "decode" else shape.decode_positions
        )
        attention = 44e-9 * decoded + self._prompts_s(shape.prompts)
        return (1.3e-3 + 5e-6 * len(chunks) + linears + attention) * self.noise()

    def _prompts_s(self, prompts: tuple[tuple[int, int], ...]) -> float:
        if not prompts:
            return 0.0
        counts, contexts = [count for count, _ in prompts], [end for _, end in prompts]
        parts = best_parts(counts, contexts, 32, 132) if self.is_divided else 1
        return NUM_LAYERS * KEY_S * walk_of(counts, contexts, parts, 32, 132)


@dataclass
class Times:
    """The times of one request's tokens."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)


class Simulation:
    """An engine on a simulated device."""

    def __init__(self, limits: StepLimits, device: Device | None = None, max_num_seqs: int = 256) -> None:
        self.now = 1000.0
        self.times: dict[Sequence, Times] = {}
        self.steps: list[tuple[StepShape, float]] = []  # that have ended, with their seconds
        rope = RopeConfig(rotary_dim=8, theta=10000.0, max_position_embeddings=1 << 18)
        budget = StepBudget(limits, lambda: self.now)
        self.scheduler = Scheduler(KVCacheManager(55000, 16, False), None, rope, max_num_seqs, budget)
        self._device = device or H200()
        self._launched: deque[tuple[StepShape, float]] = deque()
        self.driven = SteppedScheduler(self.scheduler, Events(self._launch, self._end, self._sample))

    def send(self, num_prompt: int, num_answer: int) -> Sequence:
        sequence = Sequence("", [1] * num_prompt, num_prompt, SamplingParams(), seed=0, max_tokens=num_answer)
        sequence.queued_s = self.now
        self.times[sequence] = Times(self.now)
        self.scheduler.add(sequence)
        return sequence

    def first_token_s(self, sequence: Sequence) -> float:
        """Runs steps until the sequence has a token. Returns the seconds since it was sent."""
        times = self.times[sequence]
        while not times.token_s:
            self.driven.step()
        return times.token_s[0] - times.sent_s

    def _launch(self, chunks: list[Chunk]) -> None:
        self._launched.append((shape_of(chunks), self._device.seconds(chunks)))

    def _end(self) -> None:
        shape, seconds = self._launched.popleft()
        self.now += seconds
        self.steps.append((shape, seconds))
        self.scheduler.budget.observe(shape, seconds)

    def _sample(self, sequence: Sequence) -> None:
        self.times[sequence].token_s.append(self.now)


@dataclass(frozen=True)
class Load:
    """The speed and the latencies that the clients of a load measure."""

    tokens_per_s: float
    ttft_ms: list[float]
    gap_ms: list[float]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def closed_loop(simulation: Simulation, streams: int, requests: int) -> Load:
    """Returns the Load of clients, each of which sends a request when its last one is answered."""
    started, num_sent, driven = simulation.now, 0, simulation.driven
    while len(driven.finished) < requests:
        while num_sent < min(requests, streams + len(driven.finished)):
            simulation.send(512, 128)
            num_sent += 1
        driven.step()
    times = simulation.times.values()
    return Load(
        sum(len(one.token_s) for one in times) / (simulation.now - started),
        [(one.token_s[0] - one.sent_s) * 1e3 for one in times],
        [(after - before) * 1e3 for one in times for before, after in pairwise(one.token_s)],
    )
