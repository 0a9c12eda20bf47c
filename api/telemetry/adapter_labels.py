"""Chooses the adapters that have a metrics label of their own: those with the most recent requests. The others share
OTHER.

Counts stay with the label under which they were counted, so no series ever decreases. An adapter that gets a label
starts its own series and leaves its past in OTHER. An adapter that loses its label counts into OTHER from then on.
Its series is hidden, but continues where it stopped if the label returns.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from heapq import nlargest

OTHER = "other"
MAX_LABELS = 50  # Adapters with labels on one replica.
ELECTION_S = 60.0  # After this time request counts are halved and labels may change owners.
# Another adapter needs this many times the requests to take a label; otherwise equal ones would swap forever.
KEEP_FACTOR = 2.0


class AdapterLabels:
    def __init__(self, capacity: int = MAX_LABELS, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown: set[str] = set()
        self._capacity = capacity
        self._clock = clock
        self._recent: Counter[str] = Counter()  # requests; older ones count less
        self._election_s = clock() + ELECTION_S

    def count(self, name: str) -> str:
        """Counts one more request for the adapter, and returns the label to count it under."""
        self._recent[name] += 1
        if self._clock() >= self._election_s:
            self._elect()
        return self.label(name)

    def label(self, name: str) -> str:
        if name not in self.shown and len(self.shown) < self._capacity and name != OTHER:
            self.shown.add(name)
        return name if name in self.shown else OTHER

    def _elect(self) -> None:
        def claim(name: str) -> float:
            return self._recent[name] * (KEEP_FACTOR if name in self.shown else 1.0)

        self.shown = set(nlargest(self._capacity, self._recent, key=claim)) - {OTHER}
        self._recent = Counter({name: count // 2 for name, count in self._recent.items() if count > 1})
        self._election_s = self._clock() + ELECTION_S
