from __future__ import annotations

from lorafleet.protocol.histogram import Distribution, Histogram, buckets, distribution_of

BOUNDS = (1.0, 2.0, 5.0)


def test_a_value_belongs_to_the_first_bound_that_it_does_not_exceed() -> None:
    told = distribution_of([0.5, 1.0, 1.5, 5.0, 7.0], BOUNDS)
    assert buckets(told, BOUNDS) == ([("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)], 15.0)


def test_what_others_have_counted_adds_up() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(3.0)
    histogram.add(distribution_of([0.5, 9.0], BOUNDS))
    histogram.add(Distribution())
    assert histogram.distribution() == Distribution([1, 0, 1, 1], 12.5)


def test_nothing_counted_is_shown_as_zeros() -> None:
    assert buckets(Distribution(), BOUNDS) == ([("1.0", 0), ("2.0", 0), ("5.0", 0), ("+Inf", 0)], 0.0)
