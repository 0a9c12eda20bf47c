"""Which steps are faster: those with drafts, or those without."""

from __future__ import annotations

import random

from lorafleet.workers.speculation.step_pace import StepPace

TOKEN_S = 20e-6


def learned(draft_token_s: float, extra_s: float = 0.0, late: float = 0.0) -> StepPace:
    """Returns a pace that has seen batches of 1 to 64 on a device whose steps take 5 ms."""
    pace, rng = StepPace(), random.Random(3)
    for i in range(400):
        batch = 1 << rng.randrange(7)
        pace.observe(batch, 0, 5e-3 + TOKEN_S * batch + (late if i == 0 else 0), TOKEN_S)
        pace.observe(batch, 4 * batch, 5e-3 + extra_s + TOKEN_S * batch + draft_token_s * 4 * batch, TOKEN_S)
    return pace


def test_drafts_that_cost_little_pay_at_every_batch() -> None:
    pace = learned(TOKEN_S)
    for batch in (1, 8, 64):
        assert pace.is_faster(batch, 4 * batch, 1.8 * batch, TOKEN_S)
        assert not pace.is_faster(batch, 4 * batch, 0.0, TOKEN_S)


def test_the_larger_the_batch_the_more_must_be_accepted() -> None:
    pace = learned(10 * TOKEN_S)
    assert pace.is_faster(1, 4, 0.5, TOKEN_S)
    assert not pace.is_faster(64, 256, 0.5 * 64, TOKEN_S)


def test_what_a_step_with_drafts_takes_besides_its_tokens_counts() -> None:
    assert learned(TOKEN_S).is_faster(8, 32, 4, TOKEN_S)
    assert not learned(TOKEN_S, extra_s=10e-3).is_faster(8, 32, 4, TOKEN_S)


def test_before_any_step_with_drafts_the_cost_of_a_token_decides() -> None:
    pace = StepPace()
    assert pace.is_faster(8, 32, 1, TOKEN_S), "nothing is known"
    for _ in range(4):
        pace.observe(8, 0, 5e-3, TOKEN_S)
    assert pace.is_faster(8, 32, 8, TOKEN_S)
    assert not pace.is_faster(8, 32, 8, 100 * TOKEN_S)
    assert pace.price(8, TOKEN_S) < 0.1 < pace.price(8, 100 * TOKEN_S)


def test_a_step_that_waited_for_a_compiler_or_for_a_busy_host_is_soon_forgotten() -> None:
    pace = StepPace()
    pace.observe(8, 32, 20.0, TOKEN_S)
    for i in range(40):
        pace.observe(8, 0, 5e-3 if i != 20 else 2.0, TOKEN_S)
        pace.observe(8, 32, 6e-3, TOKEN_S)
    assert pace.is_faster(8, 32, 8, TOKEN_S)
    assert not pace.is_faster(8, 32, 0, TOKEN_S)
