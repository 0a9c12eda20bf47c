"""Random numbers that are a function of their arguments alone.

There is no generator state that the rest of a batch could advance. So a request draws the same numbers whatever runs
beside it, and draws them again after a preemption.
Source: SplitMix64, Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

UInt64s = np.ndarray[tuple[int], np.dtype[np.uint64]]
Float64s = np.ndarray[tuple[int], np.dtype[np.float64]]

_MASK = 2**64 - 1


def uniform(seed_B: UInt64s, position_B: UInt64s) -> Float64s:
    """Returns a number in [0, 1) with 53 random bits for each seed, modulo 2^64, and position."""
    bits_B = _splitmix(_splitmix(seed_B) ^ position_B) >> np.uint64(11)
    return bits_B * np.float64(2.0**-53)


def child_seed(seed: int, index: int) -> int:
    """Returns the seed of one of several samples, in int64. Sample 0 has the seed itself.

    The seed is mixed twice before the index is added, once more than in uniform(). So the children of neighboring
    seeds have nothing in common, and no child is a number that the parent draws.
    """
    if index == 0:
        return seed
    mixed = _mixed(_mixed(_mixed(seed & _MASK)) ^ index)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def named_seed(seed: int, name: str) -> int:
    """Returns a different seed for each name, in int64."""
    return child_seed(seed, int.from_bytes(sha256(name.encode()).digest()[:8]))


def _mixed(x: int) -> int:
    return int(_splitmix(np.array([x], np.uint64))[0])


def _splitmix(x_B: UInt64s) -> UInt64s:
    x_B = x_B + np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64, as the products
    x_B = (x_B ^ (x_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_B = (x_B ^ (x_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_B ^ (x_B >> np.uint64(31))
