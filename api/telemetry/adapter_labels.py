"""Which adapters have a label of their own in metrics: those with the most requests of late. The others share OTHER.

What is counted stays with the label under which it was counted, so that no series ever goes backwards: an adapter that
gets a label starts its own series and leaves its past in OTHER; one that loses it counts into OTHER from then on, and
its series is not shown any more, but goes on where it stopped if the label comes back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from heapq import nlargest

OTHER = "other"
MAX_LABELS = 50  # adapters with labels on one replica
ELECTION_S = 60.0  # after which request counts are halved and labels may change hands
KEEP_FACTOR = 2.0  # how much more another adapter must have to take a label away: else equals would swap for ever


class AdapterLabels:
    def __init__(self, capacity: int = MAX_LABELS, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown: set[str] = set()
        self._capacity = capacity
        self._clock = clock
        self._recent: Counter[str] = Counter()  # requests, older ones counting less
        self._election_s = clock() + ELECTION_S

    def count(self, name: str) -> str:
        """One more request for the adapter; the label to count it under."""
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
