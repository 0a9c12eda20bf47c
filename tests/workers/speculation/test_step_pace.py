"""Which steps are faster: those with drafts, or those without."""

from __future__ import annotations

import random

from lorafleet.workers.speculation.step_pace import LASTING_STEPS, StepPace

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
    counts, accepted = [8, 16, 32], [4.0, 6.0, 7.0]
    assert pace.best_count(8, counts, accepted, 1e-9) == 32
    assert pace.best_count(8, counts, accepted, 10 * TOKEN_S) == 8
    assert pace.best_count(8, counts, accepted, 100 * TOKEN_S) == 0


def test_a_step_that_waited_for_a_compiler_or_for_a_busy_host_is_soon_forgotten() -> None:
    pace = StepPace()
    pace.observe(8, 32, 20.0, TOKEN_S)
    for i in range(40):
        pace.observe(8, 0, 5e-3 if i != 20 else 2.0, TOKEN_S)
        pace.observe(8, 32, 6e-3, TOKEN_S)
    assert pace.is_faster(8, 32, 8, TOKEN_S)
    assert not pace.is_faster(8, 32, 0, TOKEN_S)


def test_a_jump_of_the_time_between_two_numbers_of_tokens_counts_where_it_is() -> None:
    """Steps of more than 256 rows run by a larger CUDA graph."""
    pace = StepPace()
    for i in range(200):
        pace.observe(64, 0, 5e-3, TOKEN_S)
        num_drafts = 16 * (1 + i % 16)
        pace.observe(64, num_drafts, 6e-3 if num_drafts <= 192 else 12e-3, TOKEN_S)
    assert pace.is_faster(64, 192, 32, TOKEN_S)
    assert not pace.is_faster(64, 256, 64, TOKEN_S)


def test_after_another_batch_the_time_of_this_one_is_known_at_once() -> None:
    pace = StepPace()
    for _ in range(200):
        pace.observe(256, 0, 20e-3, TOKEN_S)
        pace.observe(256, 128, 40e-3, TOKEN_S)
    for _ in range(2):
        pace.observe(4, 0, 5e-3, TOKEN_S)
        pace.observe(4, 16, 9e-3, TOKEN_S)
    assert pace.is_faster(4, 16, 4, TOKEN_S)
    assert not pace.is_faster(4, 16, 2, TOKEN_S)


def test_a_range_that_was_slow_long_ago_is_tried_again() -> None:
    """Such as before the CUDA graph of its steps was captured."""
    pace = StepPace()
    pace.observe(64, 0, 5e-3, TOKEN_S)
    for _ in range(4):
        pace.observe(64, 256, 30e-3, TOKEN_S)
    for _ in range(LASTING_STEPS + 1):
        assert not pace.is_faster(64, 256, 128, TOKEN_S)
        pace.observe(64, 0, 5e-3, TOKEN_S)
    pace.observe(64, 16, 5.2e-3, TOKEN_S)
    assert pace.is_faster(64, 256, 250, TOKEN_S)


def test_the_only_step_of_a_range_is_not_believed_where_there_are_others() -> None:
    """It may have been the first one with drafts, which loads kernels."""
    pace = StepPace()
    pace.observe(64, 0, 6e-3, TOKEN_S)
    pace.observe(64, 256, 60e-3, TOKEN_S)
    assert not pace.is_faster(64, 256, 200, TOKEN_S)
    for _ in range(2):
        pace.observe(64, 16, 7e-3, TOKEN_S)
    assert pace.is_faster(64, 256, 200, TOKEN_S)
    for _ in range(2):
        pace.observe(64, 256, 60e-3, TOKEN_S)
    assert not pace.is_faster(64, 256, 200, TOKEN_S)


def test_the_number_of_drafts_is_one_that_a_step_has_room_for_without_taking_longer() -> None:
    """A graph of 256 rows takes 11 ms and one of 320 takes 13, as on an H200 with 8 adapters (benchmarks/NOTES.md)."""
    pace, counts = StepPace(), [128, 192, 200, 256]
    for _ in range(4):
        pace.observe(64, 0, 6e-3, TOKEN_S)
        for count, seconds in zip(counts, (10e-3, 11e-3, 12.8e-3, 13e-3), strict=True):
            pace.observe(64, count, seconds, TOKEN_S)
    accepted = [64 * (0.7 + 0.49), 64 * 1.533, 64 * 1.533 + 8 * 0.24, 64 * 1.773]
    assert pace.best_count(64, counts, accepted, TOKEN_S) == 192
    assert pace.best_count(64, counts, [0.2 * each for each in accepted], TOKEN_S) == 0
    assert pace.best_count(64, counts, list(map(float, counts)), TOKEN_S) == 256


def test_a_step_takes_no_longer_than_one_of_more_tokens() -> None:
    pace = StepPace()
    pace.observe(64, 0, 6e-3, TOKEN_S)
    for _ in range(2):
        pace.observe(64, 56, 60e-3, TOKEN_S)
    for _ in range(3):
        pace.observe(64, 256, 13e-3, TOKEN_S)
    assert not pace.is_faster(64, 44, 44, TOKEN_S), "13 ms are too long for them too"
    for _ in range(3):
        pace.observe(64, 100, 8e-3, TOKEN_S)
    assert pace.is_faster(64, 56, 50, TOKEN_S)


def test_a_device_that_waits_for_the_host_around_steps_with_drafts_matters_most_where_prompts_divide_them() -> None:
    pace = learned(TOKEN_S)
    assert pace.is_faster(8, 32, 4, TOKEN_S)
    for batch, idle_s in ((64, 20e-3), (8, 2e-3)):
        for _ in range(8):
            pace.idled(batch, idle_s)
    assert not pace.is_faster(8, 32, 4, TOKEN_S)
    pace.num_in_row = 8.0
    assert pace.is_faster(8, 32, 4, TOKEN_S), "it waits once behind all of them"
    assert not pace.is_faster(64, 256, 30, TOKEN_S), "with more decodes, the host takes longer"
