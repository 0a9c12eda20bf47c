"""Counts the adapters that replicas hold, relative to the replica that holds the most."""

# R replicas

from __future__ import annotations

import numpy as np


class HeldCounts:
    """The number of adapters that each of `num_replicas` replicas holds in its host memory and slots."""

    def __init__(self, num_replicas: int) -> None:
        self._held_R = np.zeros(num_replicas)
        self._most = 1  # The largest number, at least 1.

    def set(self, index: int, num_held: int) -> None:
        before, self._held_R[index] = self._held_R[index], num_held
        if num_held > self._most:
            self._most = num_held
        elif num_held < before == self._most:
            self._most = max(1, int(self._held_R.max()))

    def share(self, index: int) -> float:
        """Returns how full a replica is, from 0 to 1 for the one that holds the most."""
        return float(self._held_R[index]) / self._most

    def emptiest(self, cost_R: np.ndarray, full_s: float) -> int:
        """Returns the replica with the lowest cost if the fullest one costs full_s more, and the others less."""
        return int((cost_R + self._held_R * (full_s / self._most)).argmin())
