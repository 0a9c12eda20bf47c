"""Chooses how many draft tokens each sequence has in a step.

A step takes as long as the CUDA graph that fits it, so there is a best number of draft tokens for a whole step rather
than for a sequence. The step verifies so many of those that are right most often.
"""

# S sequences · K most draft tokens of one of them · N draft tokens of all

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.speculation.acceptance import Acceptances
from lorafleet.workers.speculation.step_pace import StepPace
from lorafleet.workers.step.drafted_sizes import drafted_counts

PROBE_TOKENS = 2  # Draft tokens of one sequence that are verified though that should not pay.
PROBE_SEQUENCES = 8  # Sequences that have them in one step.

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class RankedDrafts:
    """The draft tokens of some sequences, the best ones first."""

    num_sequences: int
    sequence_N: Ints  # Index of the sequence that each one is of.
    accepted_N: Floats  # How many of those up to each one should be accepted.

    @classmethod
    def of(cls, probabilities: Many[float], lengths: Many[int]) -> RankedDrafts:
        """Returns the draft tokens of sequences.

        Args:
            probabilities: Acceptance.probability of each sequence.
            lengths: Number of draft tokens that each may have.
        """
        most = max(lengths, default=0)
        place_K1 = np.arange(1, most + 1)[:, None]
        chance_KS = np.power(np.asarray(probabilities, np.float64), place_K1)
        # Those that do not exist come last. Among equals, the first tokens of all drafts come before the second ones.
        chance_KS[place_K1 > np.asarray(lengths)] = -1.0
        order_N = np.argsort(-chance_KS.ravel(), kind="stable")[: sum(lengths)]
        accepted_N = np.cumsum(chance_KS.ravel()[order_N])
        return cls(len(lengths), order_N % max(1, len(lengths)), accepted_N)

    def __len__(self) -> int:
        return len(self.sequence_N)

    def accepted(self, count: int) -> float:
        """Returns how many of the first `count` draft tokens should be accepted."""
        return float(self.accepted_N[count - 1]) if count else 0.0

    def lengths(self, count: int) -> list[int]:
        """Returns how many of the first `count` draft tokens each sequence has. None lacks a token before another."""
        counts: list[int] = np.bincount(self.sequence_N[:count], minlength=self.num_sequences).tolist()
        return counts


class DraftChoice:
    """The choices of one engine.

    Args:
        most_tokens: Largest number of draft tokens of one sequence.
        most_sampled: Largest number of tokens that one step may choose.
        most_drafts: Largest number of draft tokens in one step, or None if nothing else bounds it.
    """

    def __init__(
        self,
        pace: StepPace,
        acceptances: Acceptances,
        most_tokens: int,
        most_sampled: int,
        most_drafts: int | None = None,
    ) -> None:
        self._pace = pace
        self._acceptances = acceptances
        self._most_tokens = most_tokens
        self._most_sampled = most_sampled
        self._most_drafts = most_sampled if most_drafts is None else most_drafts
        self._row_counts = drafted_counts(most_sampled)  # Rows of a step that take no longer than fewer do.

    def room(self, num_sequences: int) -> int:
        """Returns the number of draft tokens that a step of so many sequences has room for."""
        return min(self._most_sampled - num_sequences, self._most_drafts)

    def lengths(
        self, num_decodes: int, sequences: Many[Sequence], mosts: Many[int], room: int, num_forced: int, token_s: float
    ) -> list[int] | None:
        """Returns the number of draft tokens of each sequence with which a step should give most tokens per second, or
        None if it should be faster without any.

        Args:
            mosts: Number of draft tokens that each sequence may have.
            room: Number that all may have, besides the forced ones.
            num_forced: Number of other draft tokens of the step, which cannot be wrong.
            token_s: As in StepPace.
        """
        ranked = RankedDrafts.of([self._acceptances.of(sequence).probability for sequence in sequences], mosts)
        most = min(len(ranked), room)
        counts = {0, most, *(count - num_decodes - num_forced for count in self._row_counts)}
        counts.update(len(ranked) * place // self._most_tokens for place in range(1, self._most_tokens))
        totals = sorted(count for count in counts if 0 <= count <= most and count + num_forced > 0)
        accepted = [ranked.accepted(count) + num_forced for count in totals]
        with_forced = [count + num_forced for count in totals]
        best = self._pace.best_count(num_decodes, with_forced, accepted, token_s)
        return ranked.lengths(best - num_forced) if best else None

    def pay(
        self, num_decodes: int, counts: Many[tuple[Sequence, int]], right: Container[Sequence], token_s: float
    ) -> bool:
        """Returns whether a step with so many draft tokens of these sequences should be faster than one without any.

        Args:
            right: Sequences whose drafts cannot be wrong.
            token_s: As in StepPace.
        """
        expected = self._acceptances.expected(counts, right=right)
        return self._pace.is_faster(num_decodes, sum(count for _, count in counts), expected, token_s)

    def probed(
        self, num_decodes: int, sequences: Many[Sequence], mosts: Many[int], room: int, num_forced: int
    ) -> list[int]:
        """Returns the number of draft tokens of each sequence in a step that tries whether drafts pay. The arguments
        are those of lengths()."""
        # Those that would pay if more rows took no more time, since this may be so for many rows.
        lengths = self.lengths(num_decodes, sequences, mosts, room, num_forced, 0.0) or [0] * len(sequences)
        for i, own in enumerate(lengths[:PROBE_SEQUENCES]):
            lengths[i] = max(own, min(mosts[i], PROBE_TOKENS, own + room - sum(lengths)))
        return lengths
