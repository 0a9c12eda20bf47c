"""Counts the adapters that replicas hold, relative to the room in their host memory."""

# R replicas

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_LIMIT = 1 << 30  # Room of a replica that has not said how many adapters fit into its host memory.


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """The expected costs of one more read to others, in seconds."""

    full_s: float = 0.3  # At the replica that holds the most adapters; less at others, in proportion to what they hold.
    # More at a replica without room, while another has room. An adapter that nobody else holds is evicted, and each of
    # its later requests does the same to another one. It is also how long reads may wait at a replica that has just
    # joined while others could do them at once.
    crowded_s: float = 1.0
    # More while no replica has room. An adapter is evicted. If all of them just fit, nobody else holds that one, and a
    # later request reads it again.
    evict_s: float = 0.5


class HeldCounts:
    """The number of adapters that each of `num_replicas` replicas holds in its host memory and slots, or is about to
    read for requests that were sent there."""

    def __init__(self, num_replicas: int) -> None:
        self._held_R = np.zeros(num_replicas)
        self._coming_R = np.zeros(num_replicas)
        self._capacity_R = np.full(num_replicas, float(NO_LIMIT))
        self._most = 1  # The largest number held, at least 1.

    def set(self, index: int, num_held: int) -> None:
        before, self._held_R[index] = self._held_R[index], num_held
        if num_held > self._most:
            self._most = num_held
        elif num_held < before == self._most:
            self._most = max(1, int(self._held_R.max()))

    def set_coming(self, index: int, num_coming: int, capacity: int) -> None:
        """Records how many adapters a replica will read that it does not hold, and how many fit into its host
        memory."""
        self._coming_R[index], self._capacity_R[index] = num_coming, capacity

    def cost_s(self, index: int, costs: ReadCosts) -> float:
        """Returns the cost of one more read to others."""
        return float(self._costs_R(costs)[index])

    def best(self, cost_R: np.ndarray, costs: ReadCosts) -> int:
        """Returns the replica with the lowest sum of its cost and that of cost_s()."""
        return int((cost_R + self._costs_R(costs)).argmin())

    def _costs_R(self, costs: ReadCosts) -> np.ndarray:
        has_room_R = self._held_R + self._coming_R < self._capacity_R
        costs_R = self._held_R * (costs.full_s / self._most)
        if has_room_R.all():
            return costs_R
        if not has_room_R.any():
            return costs_R + costs.evict_s
        return costs_R + np.where(has_room_R, 0.0, costs.crowded_s)
