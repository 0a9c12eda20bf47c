"""Drives a scheduler as the engine does if steps overlap, without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence


@dataclass
class Events:
    """What a test does at each event."""

    launches: Callable[[list[Chunk]], None] = lambda _: None  # before a step is launched
    ends: Callable[[], None] = lambda: None  # when the first of the launched steps has ended
    samples: Callable[[Sequence], None] = lambda _: None  # when the token of a sequence is known
    stops: Callable[[Sequence], bool] = lambda _: False  # whether a sequence ends with the token that it has just got


class SteppedScheduler:
    """Launches each step before the tokens of the step before are known, unless the scheduler may preempt."""

    def __init__(self, scheduler: Scheduler, events: Events | None = None) -> None:
        self.scheduler = scheduler
        self.finished: list[Sequence] = []
        self.num_waits = 0  # steps whose tokens had to be known before the next
        self._events = events or Events()
        self._in_flight: list[tuple[Chunk, int]] = []  # with the number of tokens computed after the step

    def step(self) -> list[Chunk]:
        """Returns the chunks of the step that it launches."""
        if self._in_flight and self.scheduler.may_preempt:
            self.num_waits += 1
            self._collect()
        chunks = self.scheduler.schedule([chunk for chunk, _ in self._in_flight])
        for chunk, _ in self._in_flight:
            assert chunk.sequence.blocks is not None or chunk.sequence.ended, "a step in flight was preempted"
        if chunks:
            self._events.launches(chunks)
        self.scheduler.launched(chunks)
        launched = [(chunk, chunk.sequence.num_computed) for chunk in chunks]
        self._collect()
        self._in_flight = launched
        return chunks

    def _collect(self) -> None:
        if self._in_flight:
            self._events.ends()
        for chunk, end in self._in_flight:
            sequence = chunk.sequence
            if sequence.ended:
                continue
            self.scheduler.commit(sequence, end)
            if end == len(sequence.tokens) or sequence.tokens[end] != UNKNOWN:
                continue
            sequence.tokens[end] = end
            self._events.samples(sequence)
            if end + 1 - sequence.num_prompt >= sequence.max_tokens or self._events.stops(sequence):
                sequence.ended = True
                self.scheduler.finish(sequence)
                self.finished.append(sequence)
        self._in_flight = []
