"""Estimates how often the drafts of a sequence are accepted, and how many tokens of them are worth verifying.

Each draft token is taken to be right with the same probability, if those before it are. Its estimate counts recent
tokens more than old ones. A sequence begins with the estimate of its adapter's recent sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.9  # Weight of what was known before, each time that a draft has been verified.
CERTAINTY = 2.0  # Number of tokens as which the first estimate counts.


@dataclass(slots=True)
class Acceptance:
    """The accepted draft tokens, and those that ended a draft since they were wrong. Old ones count less."""

    num_right: float
    num_wrong: float

    @classmethod
    def expecting(cls, probability: float) -> Acceptance:
        return cls(CERTAINTY * probability, CERTAINTY * (1 - probability))

    @property
    def probability(self) -> float:
        """Probability that a draft token is right if those before it are."""
        return self.num_right / (self.num_right + self.num_wrong)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in a draft that has been verified."""
        self.num_right = MEMORY * self.num_right + num_accepted
        self.num_wrong = MEMORY * self.num_wrong + (num_accepted < num_drafted)

    def expected(self, num_drafted: int) -> float:
        """Returns the number of tokens of a draft that should be accepted."""
        p, total = self.probability, 0.0
        for _ in range(num_drafted):
            total = p * (1 + total)
        return total

    def worthwhile(self, most: int, price: float) -> int:
        """Returns the number of draft tokens, up to `most`, each of which is accepted more often than `price`."""
        p, chance, count = self.probability, 1.0, 0
        while count < most and chance * p > price:
            chance *= p
            count += 1
        return count
