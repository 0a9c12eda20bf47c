"""Implements rendezvous hashing, which computes on the spot to which replica a key belongs, alike in every process.

Each replica draws a number for the key, and the smallest number wins. When a replica comes or goes, only the keys
that it wins or had won move. A weight makes a replica win more or fewer keys; as it grows, keys only move towards
that replica. Source: Thaler and Ravishankar 1996; weights by Schindelhauer and Schomaker 2005.
"""

# R replicas

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)  # MurmurHash3's 64-bit finalizer
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT_33 = np.uint64(33)
_SHIFT_11 = np.uint64(11)


def key_of(text: str) -> int:
    """Returns 64 bits that are the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class Rendezvous:
    """The hash over a fixed set of replicas, whose weights are above 0."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.replicas = sorted(weights)
        self._seed_R = np.array([key_of(replica_id) for replica_id in self.replicas], np.uint64)
        self._scale_R = -1.0 / np.array([weights[replica_id] for replica_id in self.replicas], np.float64)

    def home(self, key: int) -> int:
        """Returns the winner's index in `replicas`, which must not be empty."""
        return int(self._draw(key).argmin())

    def order(self, key: int, count: int) -> list[int]:
        """Returns the indices of the first `count` replicas, best first."""
        drawn_R = self._draw(key)
        if count < len(drawn_R):
            first = np.argpartition(drawn_R, count)[:count]
            return [int(index) for index in first[drawn_R[first].argsort(kind="stable")]]
        return [int(index) for index in drawn_R.argsort(kind="stable")]

    def first(self, key: int, count: int) -> list[str]:
        """Returns the ids of the first `count` replicas, best first."""
        return [self.replicas[index] for index in self.order(key, count)]

    def _draw(self, key: int) -> npt.NDArray[np.float64]:
        """Draws from an exponential distribution for each replica, with its weight as the rate. The smallest number
        is r's with probability w[r] / sum(w)."""
        mixed_R = self._seed_R ^ np.uint64(key)
        mixed_R ^= mixed_R >> _SHIFT_33
        mixed_R *= _MIX_1
        mixed_R ^= mixed_R >> _SHIFT_33
        mixed_R *= _MIX_2
        mixed_R ^= mixed_R >> _SHIFT_33
        uniform_R = (mixed_R >> _SHIFT_11).astype(np.float64)
        uniform_R += 0.5
        uniform_R *= 2.0**-53
        drawn_R: npt.NDArray[np.float64] = np.log(uniform_R, out=uniform_R)
        drawn_R *= self._scale_R
        return drawn_R
