from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slora_workload import Workload, draw

WORKLOAD = Workload(rate=20, duration_s=1000, num_adapters=100, alpha=0.3)


def gaps(workload: Workload) -> np.ndarray:
    return np.diff([0.0, *(one.at_s for one in draw(workload))])


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_coefficient_of_variation_asked_for(cv: float) -> None:
    found = gaps(replace(WORKLOAD, cv=cv))
    assert len(found) == 20_000
    assert found.mean() == pytest.approx(1 / 20, rel=0.1)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.1)


def test_gaps_of_cv_one_are_exponential() -> None:
    found = np.sort(gaps(WORKLOAD)) * 20
    expected = -np.log1p(-(np.arange(len(found)) + 0.5) / len(found))
    assert np.abs(np.exp(-found) - np.exp(-expected)).max() < 0.02  # Kolmogorov-Smirnov's distance


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_adapters_follow_the_power_law(alpha: float) -> None:
    adapters = np.array([one.adapter for one in draw(replace(WORKLOAD, alpha=alpha))])
    assert adapters.min() >= 0 and adapters.max() == 99
    for k in (1, 10, 32, 64):
        assert (adapters < k).mean() == pytest.approx((k / 100) ** alpha, abs=0.012)


def test_lengths_are_uniform_over_the_whole_range() -> None:
    arrivals = draw(replace(WORKLOAD, input_range=(8, 11), output_range=(3, 4)))
    assert np.unique([one.num_input for one in arrivals], return_counts=True)[1] == pytest.approx([5000] * 4, rel=0.05)
    assert {one.num_output for one in arrivals} == {3, 4}


def test_the_same_seed_gives_the_same_arrivals_and_lengths_whatever_the_adapters() -> None:
    few, none = draw(replace(WORKLOAD, num_adapters=8)), draw(replace(WORKLOAD, num_adapters=0))
    assert draw(WORKLOAD) == draw(WORKLOAD)
    assert [replace(one, adapter=None) for one in draw(WORKLOAD)] == none
    assert [replace(one, adapter=None) for one in few] == none
    assert draw(replace(WORKLOAD, seed=1)) != draw(WORKLOAD)


def test_another_rate_only_stretches_the_time() -> None:
    slow, fast = draw(replace(WORKLOAD, rate=10)), draw(WORKLOAD)
    for one, other in zip(slow, fast, strict=False):
        assert one.at_s == pytest.approx(2 * other.at_s)
        assert (one.num_input, one.num_output, one.adapter) == (other.num_input, other.num_output, other.adapter)
