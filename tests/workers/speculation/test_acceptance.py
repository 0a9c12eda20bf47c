"""How often drafts are accepted, and how many tokens are worth verifying."""

from __future__ import annotations

import pytest

from lorafleet.workers.speculation.acceptance import Acceptance


def test_drafts_get_shorter_the_more_of_them_are_wrong_and_longer_again() -> None:
    acceptance, price = Acceptance.expecting(0.5), 0.2
    assert acceptance.worthwhile(8, price) == 2
    for _ in range(10):
        acceptance.add(4, 0)
    assert acceptance.worthwhile(8, price) == 0
    for _ in range(3):
        acceptance.add(1, 1)
    assert 0 < acceptance.worthwhile(8, price) < 4
    for _ in range(20):
        acceptance.add(4, 4)
    assert acceptance.worthwhile(8, price) == 8


def test_nothing_is_worth_a_token_that_costs_as_much_as_one() -> None:
    acceptance = Acceptance.expecting(0.99)
    assert acceptance.worthwhile(8, 1.0) == 0
    assert acceptance.worthwhile(8, 0.0) == 8


def test_the_expected_number_of_accepted_tokens_is_the_sum_over_the_first_ones() -> None:
    assert Acceptance.expecting(0.5).expected(3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert Acceptance.expecting(0.0).expected(8) == 0
