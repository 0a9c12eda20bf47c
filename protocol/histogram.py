"""prometheus_client's histogram for many values at a time, and without its locks: one thread counts, and what it has
counted travels as plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

import msgspec

Bounds = tuple[float, ...]


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """How many values fell under each bound and not under the one before, those above the last at the end; no counts
    stand for no values. total: their sum."""

    counts: list[int] = []
    total: float = 0.0


class Histogram:
    """A value belongs to the first bound that it does not exceed."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def add(self, other: Distribution) -> None:
        """Of the same bounds."""
        for i, count in enumerate(other.counts):
            if count:
                self._counts[i] += count
        self._total += other.total

    def told(self) -> Distribution:
        return Distribution(list(self._counts), self._total)


def distribution_of(values: Iterable[float], bounds: Bounds) -> Distribution:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram.told()


def buckets(told: Distribution, bounds: Bounds) -> tuple[list[tuple[str, float]], float]:
    """As prometheus_client wants them: each bound with the number of values up to it, and their sum."""
    counts = told.counts or [0] * (len(bounds) + 1)
    return list(zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True)), told.total
