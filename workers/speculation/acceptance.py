"""Estimates how often the drafts of a sequence are accepted.

Each draft token is taken to be right with the same probability, if those before it are. Its estimate counts recent
tokens more than old ones. The estimate of the adapter's sequences counts as a few tokens of each, since that of one
sequence alone would be far off by chance.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.workers.schedule.sequence import Sequence

MEMORY = 0.9  # Weight of what was known before, each time that a draft of the sequence has been verified.
ADAPTER_MEMORY = 0.99  # The same for an adapter.
CERTAINTY = 2.0  # Number of tokens as which the first estimate of an adapter counts, until others are known.
SHARED = 2.0  # Number of tokens as which the adapter's estimate counts in that of a sequence.
MOST_ADAPTERS = 1024  # Adapters whose acceptance is remembered between their sequences.
FIRST_ACCEPTANCE = 0.5  # Probability that a draft token is right, before any of an adapter was verified.


@dataclass(slots=True)
class Acceptance:
    """The accepted draft tokens, and those that ended a draft since they were wrong. Old ones count less."""

    num_right: float = 0.0
    num_wrong: float = 0.0
    adapter: Acceptance | None = None  # The estimate of the sequence's adapter. None in the estimate of an adapter.

    @classmethod
    def expecting(cls, probability: float) -> Acceptance:
        return cls(CERTAINTY * probability, CERTAINTY * (1 - probability))

    @property
    def probability(self) -> float:
        """Probability that a draft token is right if those before it are."""
        num_right, num_tokens = self.num_right, self.num_right + self.num_wrong
        if self.adapter is not None:
            num_right, num_tokens = num_right + SHARED * self.adapter.probability, num_tokens + SHARED
        return num_right / num_tokens

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in a draft that has been verified."""
        memory = MEMORY if self.adapter is not None else ADAPTER_MEMORY
        self.num_right = memory * self.num_right + num_accepted
        self.num_wrong = memory * self.num_wrong + (num_accepted < num_drafted)

    def expected(self, num_drafted: int) -> float:
        """Returns the number of tokens of a draft that should be accepted."""
        p, total = self.probability, 0.0
        for _ in range(num_drafted):
            total = p * (1 + total)
        return total


class Acceptances:
    """The estimates of one engine's sequences."""

    def __init__(self) -> None:
        self._by_sequence: dict[Sequence, Acceptance] = {}
        self._by_adapter: LRUCache[str, Acceptance] = LRUCache(MOST_ADAPTERS)  # By digest; "" for the base.

    def of(self, sequence: Sequence) -> Acceptance:
        acceptance = self._by_sequence.get(sequence)
        if acceptance is None:
            acceptance = Acceptance(adapter=self._of_adapter(sequence.digest))
            self._by_sequence[sequence] = acceptance
        return acceptance

    def expected(self, counts: Iterable[tuple[Sequence, int]], right: Container[Sequence] = ()) -> float:
        """Returns the number of these draft tokens that should be accepted.

        Args:
            right: Sequences whose drafts cannot be wrong.
        """
        return sum(count if own in right else self.of(own).expected(count) for own, count in counts)

    def verified(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Takes in how many of a sequence's draft tokens were accepted."""
        for acceptance in (self.of(sequence), self._of_adapter(sequence.digest)):
            acceptance.add(num_drafted, num_accepted)

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        self._by_sequence.pop(sequence, None)

    def _of_adapter(self, digest: str) -> Acceptance:
        acceptance = self._by_adapter.get(digest)
        if acceptance is None:
            acceptance = Acceptance.expecting(FIRST_ACCEPTANCE)
            self._by_adapter.put(digest, acceptance)
        return acceptance
