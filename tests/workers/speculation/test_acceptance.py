"""How often drafts are accepted."""

from __future__ import annotations

import random

import pytest

from lorafleet.workers.speculation.acceptance import Acceptance


def learned(right: float, num_drafts: int, rng: random.Random, adapter: Acceptance | None = None) -> Acceptance:
    """Returns what is known after drafts of four tokens, each of which is right with this probability."""
    acceptance = Acceptance.expecting(0.5) if adapter is None else Acceptance(adapter=adapter)
    for _ in range(num_drafts):
        acceptance.add(4, next((i for i in range(4) if rng.random() >= right), 4))
    return acceptance


def test_the_estimate_follows_what_was_accepted() -> None:
    acceptance = Acceptance(adapter=Acceptance.expecting(0.5))
    assert acceptance.probability == 0.5
    for num_accepted, bounds in ((0, (0.0, 0.2)), (4, (0.6, 1.0))):
        for _ in range(10):
            acceptance.add(4, num_accepted)
        assert bounds[0] < acceptance.probability < bounds[1]


def test_a_sequence_with_few_drafts_is_taken_for_one_of_its_adapter() -> None:
    rng = random.Random(0)
    adapter = learned(0.9, 300, rng)
    assert adapter.probability == pytest.approx(0.9, abs=0.03)
    assert learned(0.9, 0, rng, adapter).probability == adapter.probability
    assert learned(0.1, 1, rng, adapter).probability > 0.5
    assert learned(0.1, 40, rng, adapter).probability < 0.35


def test_the_expected_number_of_accepted_tokens_is_the_sum_over_prefixes() -> None:
    assert Acceptance.expecting(0.5).expected(3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert Acceptance.expecting(0.0).expected(8) == 0
    assert Acceptance.expecting(1.0).expected(8) == 8
