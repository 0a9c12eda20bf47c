"""Counts the tokens, sequences and durations of the engine's steps. A step costs one reading of the clock, three
searches in sorted bounds and a few additions, however many tokens it has. Nothing here touches the device.

The adapters' share of one step cannot be timed, because their kernels run beside and inside the base's. So two things
are reported instead: the number of tokens that used an adapter, and, on a GPU, the times of steps with and without
adapters (gpu_step_clock.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from lorafleet.protocol.histogram import Bounds, Histogram
from lorafleet.protocol.messages import GPUSteps, StepStats

StepKind = Literal["decode", "prefill"]  # decode: one token of each sequence, and drafts; prefill: prompts too.

STEP_S: Bounds = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125),
    *(0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5),
)
STEP_TOKENS: Bounds = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
STEP_SEQUENCES: Bounds = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The contents of one step."""

    kind: StepKind
    num_sequences: int
    num_tokens: int
    num_adapter_tokens: int  # Those of num_tokens that used an adapter.
    # The work of attention, which is not counted for a step of decodes alone.
    decode_positions: int = 0  # Sum of the decodes' contexts.
    prompts: tuple[tuple[int, int], ...] = ()  # Each prompt's tokens in the step, and its context at their end.


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

    def ended(self, shape: StepShape, began_s: float) -> float:
        """Records a step that has just ended, and returns its duration in seconds. `began_s` is its start by
        time.perf_counter.

        If the previous step was still running at that time, the duration counts from the end of that step.
        """
        now = time.perf_counter()
        seconds = now - max(began_s, self._ended_s)
        self._seconds[shape.kind].observe(seconds)
        self._ended_s = now
        self._tokens.observe(shape.num_tokens)
        self._sequences.observe(shape.num_sequences)
        self.num_steps += 1
        self._base_tokens += shape.num_tokens - shape.num_adapter_tokens
        self._adapter_tokens += shape.num_adapter_tokens
        self._adapter_steps += shape.num_adapter_tokens > 0
        return seconds

    def stats(self, on_gpu: list[GPUSteps]) -> StepStats:
        return StepStats(
            seconds={kind: histogram.distribution() for kind, histogram in self._seconds.items()},
            tokens=self._tokens.distribution(),
            sequences=self._sequences.distribution(),
            base_tokens=self._base_tokens,
            adapter_tokens=self._adapter_tokens,
            adapter_steps=self._adapter_steps,
            on_gpu=on_gpu,
        )
