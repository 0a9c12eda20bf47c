"""The patience with a process that holds grammars, on a clock that the tests turn."""

from __future__ import annotations

import pytest

from lorafleet.workers.structured.answer_clock import PING_S, AnswerClock


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def answers(clock: Clock) -> AnswerClock:
    return AnswerClock(mask_s=30.0, ping_s=60.0, clock=clock)


def test_masks_are_overdue_after_their_limit_until_they_arrive(answers: AnswerClock, clock: Clock) -> None:
    clock.now_s += 1000.0
    assert not answers.awaits_masks and not answers.is_overdue
    answers.start_masks()
    clock.now_s += 30.0
    assert answers.awaits_masks and not answers.is_overdue
    clock.now_s += 0.1
    assert answers.is_overdue
    answers.take_masks()
    assert not answers.awaits_masks and not answers.is_overdue


def test_a_process_that_was_late_is_given_little_time_until_it_is_punctual_again(answers: AnswerClock) -> None:
    answers.start_masks()
    answers.miss_masks()
    assert answers.patience_s(1.0) == 1.0
    answers.take_masks()
    answers.start_masks()
    assert answers.patience_s(1.0) == 0.05
    answers.take_masks()
    assert answers.patience_s(1.0) == 1.0
    assert answers.patience_s(-1.0) == 0.0


def test_a_ping_is_sent_once_the_last_one_is_answered_and_a_while_ago(answers: AnswerClock, clock: Clock) -> None:
    assert answers.start_ping()
    clock.now_s += 2 * PING_S
    assert not answers.start_ping()
    answers.take_pong()
    assert answers.start_ping()
    answers.take_pong()
    clock.now_s += PING_S
    assert not answers.start_ping()


def test_an_answer_to_a_ping_is_overdue_after_its_limit(answers: AnswerClock, clock: Clock) -> None:
    answers.start_ping()
    clock.now_s += 60.0
    assert not answers.is_overdue
    clock.now_s += 0.1
    assert answers.is_overdue
    answers.take_pong()
    assert not answers.is_overdue
