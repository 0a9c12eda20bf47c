"""Drafts follow the step in flight where that is faster, and either way is timed again and again."""

from __future__ import annotations

import pytest

from lorafleet.workers.speculation.ahead_pace import TRIAL_PERIOD, TRIAL_STEPS, AheadPace, DraftedWay


def ways(pace: AheadPace, num_steps: int, ahead_s: float, waiting_s: float) -> list[bool]:
    """Returns which way each of so many steps goes, if they take so long."""
    found: list[bool] = []
    for _ in range(num_steps):
        found.append(pace.is_ahead(1e-6))
        pace.observe(10, ahead_s if found[-1] else waiting_s, 1e-6, DraftedWay(found[-1]))
    return found


@pytest.mark.parametrize(("ahead_s", "waiting_s", "expected"), [(5e-3, 6e-3, True), (5e-3, 4e-3, False)])
def test_the_faster_way_is_used_and_the_other_is_tried_now_and_then(
    ahead_s: float, waiting_s: float, expected: bool
) -> None:
    found = ways(AheadPace(), 4 * TRIAL_PERIOD, ahead_s, waiting_s)
    assert found.count(not expected) < 6 * TRIAL_STEPS
    assert found[TRIAL_PERIOD:].count(not expected) >= 2 * TRIAL_STEPS


def test_the_way_changes_with_the_times() -> None:
    pace = AheadPace()
    assert ways(pace, 2 * TRIAL_PERIOD, 5e-3, 6e-3)[-1]
    assert not ways(pace, 2 * TRIAL_PERIOD, 5e-3, 3e-3)[-1]
    assert ways(pace, 2 * TRIAL_PERIOD, 2e-3, 3e-3)[-1]


@pytest.mark.parametrize(("num_others", "expected"), [(40, True), (2, False)])
def test_what_sequences_with_grammars_lose_counts_against_the_faster_way(num_others: float, expected: bool) -> None:
    """Behind a step in flight, each of two has one token a step, and three otherwise."""
    pace, found = AheadPace(), list[bool]()
    for _ in range(2 * TRIAL_PERIOD):
        found.append(pace.is_ahead(1e-6, num_others, num_masked=2))
        masked = [1, 1] if found[-1] else [4, 2]
        pace.observe(10, 5e-3 if found[-1] else 6e-3, 1e-6, DraftedWay(found[-1], masked))
    assert found[TRIAL_PERIOD:].count(expected) > TRIAL_PERIOD - 3 * TRIAL_STEPS


@pytest.mark.parametrize(("share", "expected"), [(0.9, True), (0.2, False)])
def test_room_without_drafts_counts_against_steps_that_are_planned_before(share: float, expected: bool) -> None:
    """Four sequences should get eight accepted draft tokens if the drafter fills all the room."""
    pace, found = AheadPace(), list[bool]()
    for _ in range(2 * TRIAL_PERIOD):
        found.append(pace.is_ahead(1e-6, 4, num_accepted=8))
        pace.observe(20, 5e-3 if found[-1] else 6e-3, 1e-6, DraftedWay(found[-1], found=share if found[-1] else 1.0))
    assert found[TRIAL_PERIOD:].count(expected) > TRIAL_PERIOD - 3 * TRIAL_STEPS
