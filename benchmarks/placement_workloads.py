"""Draws arrivals for benchmarks/placement.py, by the formulas of S-LoRA's, Dynamo's and dLoRA's benchmarks.

- S-LoRA: see benchmarks/slora_workload.py.
- Dynamo: adapters follow Zipf's law with exponent 1. Each tick of 3 s has a Poisson number of requests, whose mean is
  steady, diurnal, with two flash crowds, or switches between three levels.
- dLoRA: functions with rates of their own are dealt to the adapters in turn. Prompts have up to 1024 tokens and whole
  texts up to 2048, with log-normal lengths like ShareGPT's. Its Azure trace is not available here, so the rate of a
  function is log-normal, and its gaps are Gamma with cv 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import slora_workload
from slora_workload import Arrival

TICK_S = 3.0
RANKS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Load:
    """The parameters of one workload."""

    name: str  # A key of WORKLOADS.
    rate: float  # Requests per second, as the mean over the whole run.
    duration_s: float
    num_adapters: int
    seed: int


def draw(load: Load) -> list[Arrival]:
    return WORKLOADS[load.name](load)


def ranks(load: Load) -> list[int]:
    """Returns the adapters' ranks: S-LoRA's four, shuffled so that the most popular are not the largest."""
    cycle = np.resize(RANKS, load.num_adapters)
    return [int(rank) for rank in np.random.default_rng([load.seed, 9]).permutation(cycle)]


def _slora(alpha: float, cv: float) -> Callable[[Load], list[Arrival]]:
    def make(load: Load) -> list[Arrival]:
        return slora_workload.draw(
            slora_workload.Workload(load.rate, load.duration_s, load.num_adapters, alpha, cv, seed=load.seed)
        )

    return make


def _dynamo(level: Callable[[np.random.Generator, int], list[float]]) -> Callable[[Load], list[Arrival]]:
    def make(load: Load) -> list[Arrival]:
        random = np.random.default_rng([load.seed, 10])
        levels = np.array(level(random, round(load.duration_s / TICK_S)))
        counts = random.poisson(levels / levels.mean() * load.rate * TICK_S)
        at_s = np.sort((np.repeat(np.arange(len(counts)), counts) + random.random(counts.sum())) * TICK_S)
        share = 1 / np.arange(1, load.num_adapters + 1)
        adapters = random.choice(load.num_adapters, len(at_s), p=share / share.sum())
        lengths = random.integers(8, 511, (2, len(at_s)), endpoint=True)
        return _arrivals(at_s, lengths[0], lengths[1], adapters)

    return make


def _diurnal(_: np.random.Generator, num_ticks: int) -> list[float]:
    return [30 - 20 * math.cos(2 * math.pi * t / num_ticks) for t in range(num_ticks)]


def _flash(_: np.random.Generator, num_ticks: int) -> list[float]:
    """Returns the levels with two crowds, at the same parts of the run as Dynamo's ticks 50 and 130 of 200."""
    starts = [round(num_ticks * part) for part in (0.25, 0.65)]
    return [25 * (1 + sum(4 * 2 ** (-(t - s) / 8) for s in starts if t >= s)) for t in range(num_ticks)]


def _switching(random: np.random.Generator, num_ticks: int) -> list[float]:
    levels, state = [], 1
    for _ in range(num_ticks):
        levels.append((15.0, 40.0, 70.0)[state])
        if random.random() < 0.1:
            state = int(random.choice([s for s in range(3) if s != state]))
    return levels


def _dlora(load: Load) -> list[Arrival]:
    random = np.random.default_rng([load.seed, 11])
    rates = random.lognormal(0.0, 2.0, 4 * load.num_adapters)
    rates *= load.rate / rates.sum()
    at_s, adapters = [], []
    for function, rate in enumerate(rates):
        gaps = random.gamma(1 / 16, 16 / rate, int(rate * load.duration_s * 2) + 20)
        # The first arrivals look as if the function had been running for long.
        times = np.cumsum(gaps) - random.exponential(1 / rate)
        times = times[(times >= 0) & (times < load.duration_s)]
        at_s.append(times)
        adapters.append(np.full(len(times), function % load.num_adapters))
    times = np.concatenate(at_s)
    order = times.argsort()
    prompts = np.clip(random.lognormal(5.0, 1.2, len(times)), 4, 1024).astype(int)
    answers = np.clip(random.lognormal(5.2, 0.9, len(times)), 4, 2048 - prompts).astype(int)
    return _arrivals(times[order], prompts, answers, np.concatenate(adapters)[order])


def _arrivals(*columns: np.ndarray) -> list[Arrival]:
    return [Arrival(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


WORKLOADS: dict[str, Callable[[Load], list[Arrival]]] = {
    "S-LoRA, alpha .3": _slora(0.3, 1.0),
    "S-LoRA, alpha .6, cv 4": _slora(0.6, 4.0),
    "Dynamo, steady": _dynamo(lambda _, num_ticks: [40.0] * num_ticks),
    "Dynamo, diurnal": _dynamo(_diurnal),
    "Dynamo, flash": _dynamo(_flash),
    "Dynamo, switching": _dynamo(_switching),
    "dLoRA": _dlora,
}
