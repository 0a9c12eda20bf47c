"""Times some of the steps on the GPU itself, with one event before the model and one behind it, in its stream. Both
are read at a later step, once they have passed, so that nothing ever waits for them.

The difference between a step with adapters and one of as many tokens without is the cost of adapters; see
docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lorafleet.protocol.messages import GPUSteps
from lorafleet.protocol.step_metrics import StepKind, StepShape

EVERY = 32  # one step in this many is timed


class TimedEvent(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Returns the milliseconds between the two events."""
        ...


Key = tuple[StepKind, bool, int]  # kind, whether it used adapters, tokens rounded up to a power of two


def _cuda_event() -> TimedEvent:
    return torch.cuda.Event(enable_timing=True)


class GPUStepClock:
    def __init__(self, every: int = EVERY, make_event: Callable[[], TimedEvent] = _cuda_event) -> None:
        self._every = every
        self._until_next = every
        self._begin, self._end = make_event(), make_event()
        self._timed: StepShape | None = None  # the step whose events have not been read yet
        self._sums: dict[Key, tuple[int, float]] = {}

    def begin(self) -> bool:
        """Starts to time the next step if it is due. Returns whether this step is timed. Call it before each step."""
        self._until_next -= 1
        if self._until_next > 0:
            return False
        self._until_next = self._every
        self._read()
        if self._timed is not None:
            return False  # the device is still behind by that many steps
        self._begin.record()
        return True

    def end(self, shape: StepShape) -> None:
        """Ends the timing of a step. Call it behind each step that is timed."""
        self._end.record()
        self._timed = shape

    def totals(self) -> list[GPUSteps]:
        """Returns the steps that were timed so far, by kind."""
        self._read()
        return [
            GPUSteps(kind, adapters, tokens, count, seconds)
            for (kind, adapters, tokens), (count, seconds) in self._sums.items()
        ]

    def _read(self) -> None:
        if self._timed is None or not self._end.query():
            return
        shape, self._timed = self._timed, None
        key = shape.kind, shape.num_adapter_tokens > 0, 1 << (shape.num_tokens - 1).bit_length()
        count, seconds = self._sums.get(key, (0, 0.0))
        self._sums[key] = count + 1, seconds + self._begin.elapsed_time(self._end) / 1e3
