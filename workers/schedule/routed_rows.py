"""The experts of a sequence's tokens that its outputs have not yet reported."""

# T tokens of a chunk · L layers · K experts a token

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Rows = np.ndarray[tuple[int, int, int], np.dtype[Any]]


@dataclass(slots=True)
class RoutedRows:
    num_tokens: int = 0  # Tokens whose experts are known, reported or not.
    unreported: bytearray = field(default_factory=bytearray)

    def add(self, end: int, rows_TLK: Rows) -> None:
        """Adds the experts of a chunk's tokens, the last of which has index end - 1. Tokens that are computed again,
        after a preemption, keep those with which they were computed first."""
        first = end - len(rows_TLK)
        assert first <= self.num_tokens, "prompts of such sequences are computed whole"
        self.unreported += rows_TLK[self.num_tokens - first :].tobytes()
        self.num_tokens = max(self.num_tokens, end)

    def take(self) -> bytes:
        """Returns what is not reported yet, which then is."""
        taken, self.unreported = bytes(self.unreported), bytearray()
        return taken
