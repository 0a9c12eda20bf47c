"""Decides how many prompt tokens a step computes beside decodes, for which every stream waits.

A step should take no longer than max_gap_s. Within that, prompts get what they need to have their first tokens by
ttft_target_s: the more they are behind, the longer the step. The seconds come from a fitted cost (step_cost.py).
So a long prompt gets smaller chunks as its context grows. Where decodes alone take nearly max_gap_s or more, prompts
still get a part of the step.

Longer steps give prompts a larger share of the time, up to LARGEST_SHARE. Beyond that, a step of twice the time would
delay every stream twice as much, and speed the prompts up by a few percent only.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lorafleet.workers.schedule.fair_queue import FairQueue
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.schedule.step_cost import StepCost, StepCostFit

if TYPE_CHECKING:
    from lorafleet.protocol.step_metrics import StepShape

RELAXED = 0.3  # share of max_gap_s that a step with prompts may take though no prompt is behind
LARGEST_SHARE = 0.85  # share of the time beyond which prompts get no longer steps, since they would gain little
LEAST_STRETCH = 1.5  # a step with prompts may take this many times as long as its decodes in any case
MOST_READING = 0.2  # share of a step's time that reading the first prompt's context should not exceed
LEAST_CHUNK = 64  # tokens of a step's first prompt that it computes in any case; a tile of the GEMMs


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits and aims that a user sets."""

    max_tokens: int  # In any step.
    max_mixed_tokens: int | None = None  # In a step with decodes, beside which prompts may still have half of this.
    max_gap_s: float = math.inf
    ttft_target_s: float = math.inf
    graph_sizes: Many[int] = ()  # The device computes as many tokens as the smallest of these that holds the step.


@dataclass(frozen=True, slots=True)
class _Backlog:
    """The prompts that have no token yet: those of running sequences, and those that wait."""

    running: Many[Sequence]
    waiting: FairQueue

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def first_context(self) -> int:
        """Number of cached tokens that the first prompt's next tokens attend to."""
        return self.running[0].num_computed if self.running else 0

    def age_s(self, now: float) -> float:
        """Returns the time that the oldest one has waited, as far as it was recorded."""
        oldest = (*self.running, *self.waiting.heads())
        return now - min((s.queued_s for s in oldest if s.num_generated == 0 and s.queued_s), default=now)

    def seconds(self, cost: StepCost) -> float:
        """Returns the seconds that computing them takes. Those that wait are taken as equally long."""
        running = sum(
            cost.chunk(sequence.num_uncomputed, sequence.num_computed, adapted=sequence.lora is not None)
            for sequence in self.running
        )
        count = len(self.waiting)
        return running + count * cost.chunk(self.waiting.num_tokens // max(count, 1), 0, adapted=False)


class PromptAllowance:
    """The prompt tokens that one step may still compute.

    Args:
        num_tokens: Largest number of prompt tokens.
        seconds: Time for them; infinite if it does not matter.
        num_others: Number of the step's other tokens.
    """

    def __init__(
        self, num_tokens: int, seconds: float, cost: StepCost, num_others: int, graph_sizes: Many[int]
    ) -> None:
        self._num_tokens = num_tokens
        self._seconds = seconds
        self._cost = cost
        self._num_used = num_others
        self._graph_sizes = graph_sizes
        self._has_chunk = False

    @property
    def is_spent(self) -> bool:
        return self._num_tokens <= 0 or (self._has_chunk and self._seconds <= 0)

    def tokens_for(self, sequence: Sequence) -> int:
        """Returns the number of a prompt's next tokens that the step may compute, which may be 0."""
        most = min(sequence.num_uncomputed, self._num_tokens)
        if math.isinf(self._seconds):
            return most
        in_time = self._cost.tokens_within(self._seconds, sequence.num_computed, adapted=sequence.lora is not None)
        return min(most, self._filled(in_time))

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        self._num_tokens -= num_tokens
        self._num_used += num_tokens
        self._seconds -= self._cost.chunk(num_tokens, sequence.num_computed, adapted=sequence.lora is not None)
        self._has_chunk = True

    def _filled(self, in_time: int) -> int:
        """Returns the largest number of tokens, up to those that there is time for, with which the step fills a graph.
        A graph that is not full takes as long."""
        least = 0 if self._has_chunk else LEAST_CHUNK
        fitting = bisect_right(self._graph_sizes, self._num_used + in_time)
        if 0 < fitting < len(self._graph_sizes):
            filled = self._graph_sizes[fitting - 1] - self._num_used
            if filled >= least:
                return filled
        return max(in_time, least)


class StepBudget:
    """The budget of one engine's steps. `clock` is that of Sequence.queued_s."""

    def __init__(self, limits: StepLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._fit = StepCostFit()
        self._clock = clock

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes in the duration of a step."""
        self._fit.observe(shape, seconds)

    def allowance(self, unfinished: Many[Sequence], waiting: FairQueue) -> PromptAllowance:
        """Returns the prompt tokens that the next step may compute beside the decodes of the unfinished sequences."""
        decodes = [sequence for sequence in unfinished if sequence.num_uncomputed == 1]
        backlog = _Backlog([sequence for sequence in unfinished if sequence.num_uncomputed > 1], waiting)
        num_tokens, seconds, cost = self.limits.max_tokens - len(decodes), math.inf, self._fit.cost
        if decodes and backlog:
            num_tokens = min(num_tokens, self._most_beside(len(decodes)))
            seconds = self._seconds_beside(decodes, backlog, cost)
        return PromptAllowance(num_tokens, seconds, cost, len(decodes), self.limits.graph_sizes)

    def _most_beside(self, num_decodes: int) -> int:
        """Returns the largest number of prompt tokens beside this many decodes, however little time they take."""
        most = self.limits.max_mixed_tokens
        if most is None:
            most = self.limits.max_tokens if math.isinf(self.limits.max_gap_s) else self._fit.trusted_tokens
        return max(most - num_decodes, -(-most // 2))

    def _seconds_beside(self, decodes: Many[Sequence], backlog: _Backlog, cost: StepCost) -> float:
        """Returns the time that the step may take beyond its decodes."""
        limits = self.limits
        if math.isinf(limits.max_gap_s):
            return math.inf
        num_adapted = sum(sequence.slot is not None for sequence in decodes)
        decodes_s = cost.decodes(len(decodes), num_adapted, sum(len(sequence.tokens) for sequence in decodes))
        reading_s = cost.reading(backlog.first_context)
        least_s = max(LEAST_STRETCH * decodes_s, decodes_s + reading_s / MOST_READING)
        longest_s = max(limits.max_gap_s, least_s)
        # In steps of t seconds, prompts have the share 1 - decodes_s / t of the time. This is the share that they need.
        share = backlog.seconds(cost) / max(limits.ttft_target_s - backlog.age_s(self._clock()), 1e-9)
        needed_s = decodes_s / (1 - min(share, LARGEST_SHARE))
        return min(max(needed_s, least_s, RELAXED * limits.max_gap_s), longest_s) - decodes_s
