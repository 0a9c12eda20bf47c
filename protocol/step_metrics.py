"""Counts what the engine's steps were made of and how long they took. A step costs one look at the clock, four places
in sorted bounds and a few additions, however many tokens it has; nothing here touches the device.

The adapters' share of a step cannot be timed in one: their kernels run beside and inside the base's. So two things are
told: how many of the tokens used an adapter, and, on a GPU, the times of steps with and without (gpu_step_clock.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from lorafleet.protocol.histogram import Bounds, Histogram
from lorafleet.protocol.messages import GPUSteps, StepStats

StepKind = Literal["decode", "prefill"]  # one token of each sequence; or prompts too

STEP_S: Bounds = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125),
    *(0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5),
)
STEP_TOKENS: Bounds = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
STEP_SEQUENCES: Bounds = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


@dataclass(frozen=True, slots=True)
class StepShape:
    """num_adapter_tokens: of num_tokens, those that used an adapter."""

    kind: StepKind
    num_sequences: int
    num_tokens: int
    num_adapter_tokens: int


class StepMetrics:
    def __init__(self) -> None:
        self.num_steps = 0
        self._seconds: dict[StepKind, Histogram] = {"decode": Histogram(STEP_S), "prefill": Histogram(STEP_S)}
        self._tokens = Histogram(STEP_TOKENS)
        self._sequences = Histogram(STEP_SEQUENCES)
        self._base_tokens = 0
        self._adapter_tokens = 0
        self._adapter_steps = 0
        self._ended_s = 0.0

    def ended(self, shape: StepShape, began_s: float) -> None:
        """began_s: of time.perf_counter, when the step was begun; under a step that was under way then, it counts from
        that one's end."""
        now = time.perf_counter()
        self._seconds[shape.kind].observe(now - max(began_s, self._ended_s))
        self._ended_s = now
        self._tokens.observe(shape.num_tokens)
        self._sequences.observe(shape.num_sequences)
        self.num_steps += 1
        self._base_tokens += shape.num_tokens - shape.num_adapter_tokens
        self._adapter_tokens += shape.num_adapter_tokens
        self._adapter_steps += shape.num_adapter_tokens > 0

    def told(self, on_gpu: list[GPUSteps]) -> StepStats:
        return StepStats(
            seconds={kind: histogram.told() for kind, histogram in self._seconds.items()},
            tokens=self._tokens.told(),
            sequences=self._sequences.told(),
            base_tokens=self._base_tokens,
            adapter_tokens=self._adapter_tokens,
            adapter_steps=self._adapter_steps,
            on_gpu=on_gpu,
        )
