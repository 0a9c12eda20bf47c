"""A histogram like prometheus_client's that takes many values per call and needs no locks.

One thread counts, and its counts travel to other processes as plain numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

import msgspec

Bounds = tuple[float, ...]


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """The number of values in each bucket of a histogram, and their sum."""

    # Values up to each bound and above the previous one; the last count is for values above all bounds. An empty list
    # means no values.
    counts: list[int] = []
    total: float = 0.0  # Sum of the values.


class Histogram:
    """Counts each value in the bucket of the first bound that it does not exceed."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add(self, other: Distribution) -> None:
        """Adds the counts of a distribution that has the same bounds."""
        for i, count in enumerate(other.counts):
            if count:
                self._counts[i] += count
        self._total += other.total

    def distribution(self) -> Distribution:
        return Distribution(list(self._counts), self._total)


def distribution_of(values: Iterable[float], bounds: Bounds) -> Distribution:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram.distribution()


def buckets(distribution: Distribution, bounds: Bounds) -> tuple[list[tuple[str, float]], float]:
    """Returns what prometheus_client expects: each bound with the number of values up to it, and the sum of the
    values."""
    counts = distribution.counts or [0] * (len(bounds) + 1)
    return list(zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True)), distribution.total
