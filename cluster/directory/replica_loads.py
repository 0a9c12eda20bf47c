"""Counts what one round of placement puts on each replica, and compares it with the replica's fair share."""

# R replicas

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np


class ReplicaLoads:
    """Adds up the load and the bytes of each replica's adapters.

    Args:
        weights: each replica's share of the work, normally 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.replicas = sorted(weights)
        self._index = {replica: index for index, replica in enumerate(self.replicas)}
        self._weight_R = np.array([weights[replica] for replica in self.replicas])
        self._load_R = np.zeros(len(weights))
        self._bytes_R = np.zeros(len(weights))
        self.fair_load = 0.0  # Load of a replica of weight 1, if all had their fair share; 0 until it is known.
        self._fair_bytes = 0.0

    def __contains__(self, replica: str) -> bool:
        return replica in self._index

    def set_total_load(self, total: float) -> None:
        self.fair_load = total / float(self._weight_R.sum())

    def set_total_bytes(self, total: int) -> None:
        self._fair_bytes = total / float(self._weight_R.sum())

    def count(self, replica: str, load: float, num_bytes: int) -> None:
        """Adds an adapter to the replica, or removes it if the numbers are negative."""
        index = self._index[replica]
        self._load_R[index] += load
        self._bytes_R[index] += num_bytes

    def fits(self, replica: str, load: float, num_bytes: int, bound: float) -> bool:
        """Returns whether the replica would stay within `bound` times its fair share. Any adapter fits into a replica
        that has nothing."""
        index = self._index[replica]
        limit = bound * self._weight_R[index]
        return bool(
            self._load_R[index] + load <= max(limit * self.fair_load, load)
            and self._bytes_R[index] + num_bytes <= max(limit * self._fair_bytes, num_bytes)
        )

    def emptiest(self, excluded: Iterable[str]) -> str:
        """Returns the replica with the smallest part of its fair share. Load and bytes count alike."""
        full_R = self._load_R / max(self.fair_load, 1e-9) + self._bytes_R / max(self._fair_bytes, 1e-9)
        full_R /= self._weight_R
        full_R[[self._index[replica] for replica in excluded]] = math.inf
        return self.replicas[int(full_R.argmin())]

    def excess(self, replica: str, leave: float) -> float:
        """Returns a number above 1 if the replica has more than `leave` times its fair share."""
        index = self._index[replica]
        limit = leave * self._weight_R[index]
        of_load = self._load_R[index] / (limit * self.fair_load) if self.fair_load else 0.0
        of_bytes = self._bytes_R[index] / (limit * self._fair_bytes) if self._fair_bytes else 0.0
        return float(max(of_load, of_bytes))
