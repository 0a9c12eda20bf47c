"""Draws requests as S-LoRA's benchmark does (arXiv 2311.03285, section 7): Gamma gaps, adapters by a power law.

R requests per second for D seconds are floor(R * D) requests. The gaps are Gamma(1 / cv^2, cv^2 / R); cv 1 is a Poisson
process. Adapter i of n is floor(n * u) with u of density alpha * u^(alpha - 1), so that P(i < k) = (k / n)^alpha: alpha
1 is uniform, and a smaller alpha concentrates on the first adapters. Lengths are uniform. Each quantity has a random
stream of its own: the same seed gives the same gaps, in units of 1 / R, and the same lengths, whatever the adapters
are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Workload:
    rate: float  # Requests per second.
    duration_s: float
    num_adapters: int  # If 0, every request uses the base model.
    alpha: float = 1.0
    cv: float = 1.0  # Coefficient of variation of the gaps: standard deviation divided by mean.
    input_range: tuple[int, int] = (8, 511)  # The range of prompt tokens, with both ends included.
    output_range: tuple[int, int] = (8, 511)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_input: int
    num_output: int
    adapter: int | None


def draw(workload: Workload) -> list[Arrival]:
    count = int(workload.rate * workload.duration_s)
    gaps, inputs, outputs, adapters = (np.random.default_rng([workload.seed, stream]) for stream in range(4))
    shape, scale = 1 / workload.cv**2, workload.cv**2 / workload.rate
    at_s = np.cumsum(gaps.gamma(shape, scale, count)).tolist()
    num_input = inputs.integers(*workload.input_range, count, endpoint=True).tolist()
    num_output = outputs.integers(*workload.output_range, count, endpoint=True).tolist()
    adapter: list[int | None] = [None] * count
    if workload.num_adapters:
        adapter = (workload.num_adapters * adapters.power(workload.alpha, count)).astype(int).tolist()
    return [Arrival(*fields) for fields in zip(at_s, num_input, num_output, adapter, strict=True)]
