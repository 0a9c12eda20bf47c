"""Decides how many prompt tokens a step computes beside decodes, for which every stream waits.

A step should take no longer than max_gap_s. Within that, prompts get what they need to have their first tokens by
ttft_target_s: the more they are behind, the longer the step. The seconds come from a fitted cost (step_cost.py), and
leave room for the spread of steps around it. So a long prompt gets smaller chunks as its context grows. Where decodes
alone take nearly max_gap_s or more, prompts still get a part of the step.

The device computes whole tiles (step_tiles.py). So a chunk ends where a CUDA graph or a tile of queries is full, if the
prompt is computed faster that way.

Longer steps give prompts a larger share of the time, up to LARGEST_SHARE. Beyond that, a step of twice the time would
delay every stream twice as much, and speed the prompts up by a few percent only.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lorafleet.workers.schedule.fair_queue import FairQueue
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.schedule.step_cost import StepCost, StepCostFit
from lorafleet.workers.schedule.step_tiles import StepTiles

if TYPE_CHECKING:
    from lorafleet.protocol.step_metrics import StepShape

RELAXED = 0.3  # share of max_gap_s that a step with prompts may take though no prompt is behind
LARGEST_SHARE = 0.85  # share of the time beyond which prompts get no longer steps, since they would gain little
LEAST_STRETCH = 1.5  # a step with prompts may take this many times as long as its decodes in any case
LEAST_CHUNK = 64  # tokens of a step's first prompt that it computes in any case; a tile of the GEMMs
MOST_SPREADS = 2.33  # number of standard deviations beyond its cost within which 99 % of the steps take max_gap_s


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits and aims that a user sets."""

    max_tokens: int  # In any step.
    max_mixed_tokens: int | None = None  # In a step with decodes, beside which prompts may still have half of this.
    max_gap_s: float = math.inf
    ttft_target_s: float = math.inf
    tiles: StepTiles = field(default_factory=StepTiles)


@dataclass(frozen=True, slots=True)
class _Backlog:
    """The prompts that have no token yet: those of running sequences, and those that wait."""

    running: Many[Sequence]
    waiting: FairQueue

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    def age_s(self, now: float) -> float:
        """Returns the time that the oldest one has waited, as far as it was recorded."""
        oldest = (*self.running, *self.waiting.heads())
        return now - min((s.queued_s for s in oldest if s.num_generated == 0 and s.queued_s), default=now)

    def seconds(self, cost: StepCost, tiles: StepTiles) -> float:
        """Returns the seconds that computing them takes. Those that wait are taken as equally long."""
        running = sum(
            cost.chunk(
                sequence.num_uncomputed,
                tiles.pairs(sequence.num_uncomputed, sequence.num_computed),
                num_adapted=sequence.num_uncomputed if sequence.lora is not None else 0,
            )
            for sequence in self.running
        )
        count = len(self.waiting)
        mean = self.waiting.num_tokens // max(count, 1)
        return running + count * cost.chunk(mean, tiles.pairs(mean, 0), num_adapted=0)


class PromptAllowance:
    """The prompt tokens that one step may still compute.

    Args:
        num_tokens: Largest number of prompt tokens.
        seconds: Time for them; infinite if it does not matter.
        num_others: Number of the step's other tokens.
        others_s: Time for the others.
    """

    def __init__(
        self, num_tokens: int, seconds: float, cost: StepCost, tiles: StepTiles, num_others: int, others_s: float
    ) -> None:
        self._num_tokens = num_tokens
        self._seconds = seconds
        self._cost = cost
        self._tiles = tiles
        self._num_used = num_others
        self._num_computed = num_others  # Tokens whose time is spent: those of tiles that are not full as well.
        self._spent_s = others_s
        self._has_chunk = False

    @property
    def is_spent(self) -> bool:
        return self._num_tokens <= 0 or (self._has_chunk and self._seconds <= 0)

    def tokens_for(self, sequence: Sequence) -> int:
        """Returns the number of a prompt's next tokens that the step may compute, which may be 0."""
        most = min(sequence.num_uncomputed, self._num_tokens)
        if math.isinf(self._seconds) or self._seconds_of(sequence, most) <= self._seconds:
            return most
        least = 0 if self._has_chunk else min(most, self._tiles.filled(LEAST_CHUNK, self._num_used))
        counts = range(1, most)
        in_time = bisect_right(counts, self._seconds, key=lambda count: self._seconds_of(sequence, count))
        return self._fastest(sequence, least, max(least, in_time))

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        seconds = self._seconds_of(sequence, num_tokens)
        self._seconds -= seconds
        self._spent_s += seconds
        self._num_tokens -= num_tokens
        self._num_used += num_tokens
        self._num_computed = self._tiles.tokens(self._num_used)
        self._has_chunk = True

    def _fastest(self, sequence: Sequence, least: int, most: int) -> int:
        """Returns the number of a prompt's tokens, in these bounds, at which its tokens per second are highest."""

        def speed(count: int) -> tuple[float, int]:
            return count / (self._spent_s + self._seconds_of(sequence, count)), count

        counts = [count for count in self._tiles.edges(most, self._num_used) if count > least]
        return max((least, most, *counts), key=speed)

    def _seconds_of(self, sequence: Sequence, num_tokens: int) -> float:
        """Returns the time by which the step gets longer with a prompt's next tokens."""
        return self._cost.chunk(
            self._tiles.tokens(self._num_used + num_tokens) - self._num_computed,
            self._tiles.pairs(num_tokens, sequence.num_computed),
            num_adapted=num_tokens if sequence.lora is not None else 0,
        )


class StepBudget:
    """The budget of one engine's steps. `clock` is that of Sequence.queued_s."""

    def __init__(self, limits: StepLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._fit = StepCostFit(limits.tiles)
        self._clock = clock

    @property
    def token_s(self) -> float:
        """Seconds that one more token takes in a step with prompts."""
        return self._fit.token_s

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes in the duration of a step."""
        self._fit.observe(shape, seconds)

    def allowance(
        self, unfinished: Many[Sequence], due: Many[Sequence], waiting: FairQueue, num_drafts: int = 0
    ) -> PromptAllowance:
        """Returns the prompt tokens that the next step may compute beside the decodes of the unfinished sequences, and
        so many draft tokens. The unfinished sequences that have prompt tokens left are among those in `due`."""
        prompts = [sequence for sequence in due if sequence.num_uncomputed > 1]
        backlog = _Backlog(prompts, waiting)
        cost, limits = self._fit.cost, self.limits
        num_decodes = len(unfinished) - len(prompts)
        num_decoded = num_decodes + num_drafts
        num_tokens, seconds, decodes_s = limits.max_tokens - num_decoded, math.inf, 0.0
        if backlog:  # otherwise nothing asks for seconds
            num_adapted = _num_adapted(unfinished) - _num_adapted(prompts)
            decodes_s = cost.decodes(num_decodes, num_adapted, _num_positions(unfinished) - _num_positions(prompts))
            decodes_s += cost.token * num_drafts
        if num_decodes and backlog:
            num_tokens = min(num_tokens, self._most_beside(num_decoded))
            seconds = self._seconds_beside(decodes_s, backlog, cost)
        return PromptAllowance(num_tokens, seconds, cost, limits.tiles, num_decoded, decodes_s)

    def _most_beside(self, num_decodes: int) -> int:
        """Returns the largest number of prompt tokens beside this many decodes, however little time they take."""
        most = self.limits.max_mixed_tokens
        if most is None:
            most = self.limits.max_tokens if math.isinf(self.limits.max_gap_s) else self._fit.trusted_tokens
        return max(most - num_decodes, -(-most // 2))

    def _seconds_beside(self, decodes_s: float, backlog: _Backlog, cost: StepCost) -> float:
        """Returns the time that the step may take beyond its decodes."""
        limits = self.limits
        if math.isinf(limits.max_gap_s):
            return math.inf
        least_s = LEAST_STRETCH * decodes_s
        longest_s = max(limits.max_gap_s / (1 + MOST_SPREADS * self._fit.spread), least_s)
        # In steps of t seconds, prompts have the share 1 - decodes_s / t of the time. This is the share that they need.
        target_s = max(limits.ttft_target_s - backlog.age_s(self._clock()), 1e-9)
        share = backlog.seconds(cost, limits.tiles) / target_s
        needed_s = decodes_s / (1 - min(share, LARGEST_SHARE))
        return min(max(needed_s, least_s, RELAXED * limits.max_gap_s), longest_s) - decodes_s


def _num_adapted(sequences: Many[Sequence]) -> int:
    """Returns how many of the sequences have an adapter."""
    return sum([sequence.slot is not None for sequence in sequences])


def _num_positions(sequences: Many[Sequence]) -> int:
    """Returns the sum of the sequences' tokens."""
    return sum([len(sequence.tokens) for sequence in sequences])
