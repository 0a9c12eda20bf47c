from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

from lorafleet.protocol.random_numbers import child_seed, named_seed, uniform
from lorafleet.protocol.sampling_params import SamplingParams

BINS = 20


def deviations(numbers: list[float]) -> float:
    """How far the numbers' histogram is from a flat one: chi square in standard deviations from its mean."""
    expected = len(numbers) / BINS
    counts = Counter(int(number * BINS) for number in numbers)
    chi_square = sum((counts[i] - expected) ** 2 / expected for i in range(BINS))
    return (chi_square - (BINS - 1)) / math.sqrt(2 * (BINS - 1))


def draws_of(seeds: list[int], positions: list[int]) -> list[float]:
    """Returns the numbers of each seed, at the positions one after the other."""
    seed_B = np.repeat(np.array([seed % 2**64 for seed in seeds], np.uint64), len(positions))
    return uniform(seed_B, np.tile(np.array(positions, np.uint64), len(seeds))).tolist()


def seeds_of(seed: int, n: int) -> list[int]:
    params = SamplingParams(n=n, seed=seed)
    found = [params.of_sample(i).seed for i in range(n)]
    assert all(one is not None for one in found)
    return [one for one in found if one is not None]


def test_uniform_numbers_are_uniform_over_seeds_and_positions():
    seeds, positions = (np.array(numbers, np.uint64) for numbers in zip(*product(range(100), range(100)), strict=True))
    assert abs(deviations(uniform(seeds, positions).tolist())) < 4
    seeds, positions = np.array([42, 42, 42, 2**63], np.uint64), np.array([7, 7, 8, 0], np.uint64)
    first, again, other, last = uniform(seeds, positions)
    assert first == again != other
    assert first == 0.08603176010658542  # as ever, since clients repeat a seed to repeat an answer
    assert 0 <= last < 1


def test_the_first_sample_has_the_seed_itself():
    for seed in (0, 9000, -1, -(2**63), 2**63 - 1):
        assert seeds_of(seed, 3)[0] == seed


def test_samples_of_neighboring_seeds_share_no_seed():
    seen = [seed for parent in range(9000, 9200) for seed in seeds_of(parent, 20)]
    assert len(set(seen)) == len(seen)
    assert all(-(2**63) <= seed < 2**63 for seed in seen)


@pytest.mark.parametrize("position", [0, 1, 5, 1000])
def test_the_draws_of_the_samples_of_neighboring_seeds_are_uniform_and_independent(position):
    """With seed + index, the 8000 draws would have 419 different values, and neighbors would agree nearly always."""
    draws = [draws_of(seeds_of(parent, 20), [position]) for parent in range(400)]
    assert abs(deviations([draw for row in draws for draw in row])) < 4
    # Samples of one seed, and of neighboring seeds in either direction, agree in a bin as often as chance has it.
    pairs = [pair for row in draws for pair in pairwise(row)]
    pairs += [pair for row, after in pairwise(draws) for pair in zip(row, after[1:], strict=False)]
    pairs += [pair for row, after in pairwise(draws) for pair in zip(row[1:], after, strict=False)]
    agreeing = sum(int(a * BINS) == int(b * BINS) for a, b in pairs)
    expected = len(pairs) / BINS
    assert abs(agreeing - expected) < 5 * math.sqrt(expected)


def test_a_childs_draws_are_not_its_parents():
    parents = set(draws_of(list(range(100)), list(range(50))))
    samples = [child_seed(seed, index) for seed in range(100) for index in range(1, 5)]
    children = set(draws_of(samples, list(range(10))))
    assert len(children) == 4000
    assert not parents & children


def test_every_replica_seeds_its_requests_in_its_own_way():
    seeds = [named_seed(0, name) for name in ("one", "two", "three")]
    assert len({*seeds, 0}) == 4
    assert seeds[0] == named_seed(0, "one") != named_seed(1, "one")
