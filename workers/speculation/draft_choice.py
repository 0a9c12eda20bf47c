"""Ranks the draft tokens that a step may verify, those that are right most often first.

A step takes as long as the CUDA graph that fits it, so there is a best number of draft tokens for a whole step rather
than for a sequence. The step verifies so many of the first ones.
"""

# S sequences · K most draft tokens of one of them · N draft tokens of all

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

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
