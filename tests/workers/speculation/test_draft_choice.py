"""Which draft tokens a step verifies, if it verifies so many."""

from __future__ import annotations

import random

import pytest

from lorafleet.workers.speculation.draft_choice import RankedDrafts


def test_the_first_ones_are_those_that_are_right_most_often() -> None:
    ranked = RankedDrafts.of([0.9, 0.4, 0.7], [4, 4, 4])
    assert len(ranked) == 12
    assert ranked.lengths(0) == [0, 0, 0]
    assert ranked.lengths(4) == [3, 0, 1]  # .9 .81 .729 .7
    assert ranked.lengths(6) == [4, 0, 2]  # .656 .49
    assert ranked.lengths(7) == [4, 1, 2]
    assert ranked.accepted(4) == pytest.approx(0.9 + 0.81 + 0.729 + 0.7)
    assert ranked.accepted(0) == 0.0


def test_sequences_have_no_more_than_they_may() -> None:
    rng = random.Random(1)
    for _ in range(20):
        mosts = [rng.randrange(1, 5) for _ in range(10)]
        ranked = RankedDrafts.of([rng.random() for _ in mosts], mosts)
        assert ranked.lengths(len(ranked)) == mosts
        for count in range(len(ranked)):
            lengths = ranked.lengths(count)
            assert sum(lengths) == count
            assert all(own <= most for own, most in zip(lengths, mosts, strict=True))
    assert len(RankedDrafts.of([], [])) == 0
    assert RankedDrafts.of([], []).lengths(0) == []


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_among_equals_all_sequences_have_a_token_before_any_has_two(probability: float) -> None:
    assert RankedDrafts.of([probability] * 4, [3] * 4).lengths(6) == [2, 2, 1, 1]
