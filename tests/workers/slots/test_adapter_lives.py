"""The life of one adapter on a worker: which states follow each other, and which moves they leave."""

from __future__ import annotations

import pytest

from lorafleet.protocol.messages import AdapterMove
from lorafleet.workers.slots.adapter_lives import AdapterLives, AdapterState

READING, IN_HOST, COPYING, IN_SLOT, DROPPING, GONE = AdapterState


class Lives:
    """The life of the adapter "d", with a clock that goes on by a second a state."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.moves: list[AdapterMove] = []
        self.all = AdapterLives(self.moves.append, lambda: self.now_s)

    def go(self, *states: AdapterState) -> None:
        for state in states:
            self.now_s += 1
            self.all.enter("d", state, "sql", "gpu")
            assert self.all.state("d") is state


def test_an_adapter_is_read_copied_and_returns_to_host_memory() -> None:
    lives = Lives()
    assert lives.all.state("d") is GONE
    lives.go(READING, IN_HOST, COPYING, IN_SLOT, IN_HOST, COPYING, IN_HOST, GONE)
    assert lives.moves == [AdapterMove("sql", "cpu", "gpu", 1.0)], "the second copy was given up"


def test_a_dropped_adapter_leaves_a_move_that_counts_from_the_command() -> None:
    lives = Lives()
    lives.go(READING, IN_HOST, COPYING, IN_SLOT, DROPPING)
    lives.now_s += 5
    lives.go(GONE)
    assert lives.moves[1:] == [AdapterMove("", "gpu", "none", 6.0)]


def test_a_dropped_adapter_that_was_in_no_tier_here_leaves_no_move() -> None:
    lives = Lives()
    lives.go(READING)
    lives.all.enter("d", DROPPING, nearest="disk")
    lives.go(GONE)
    assert lives.moves == []


def test_a_dropped_adapter_is_back_if_it_is_loaded_again_in_time() -> None:
    lives = Lives()
    lives.go(READING, IN_HOST, COPYING, IN_SLOT, DROPPING, IN_SLOT, DROPPING, READING, IN_HOST)
    assert [move.target for move in lives.moves] == ["gpu"]


def test_adapters_are_found_by_state_in_the_order_in_which_they_came_to_it() -> None:
    lives = Lives()
    for digest in ("a", "b", "c"):
        lives.all.enter(digest, READING)
    lives.all.enter("b", IN_HOST)
    lives.all.enter("a", IN_HOST)
    assert lives.all.in_state(READING) == ["c"]
    assert lives.all.in_state(IN_HOST) == ["b", "a"]
    assert lives.all.in_state(GONE) == []


@pytest.mark.parametrize(
    "states", [(COPYING,), (IN_SLOT,), (DROPPING,), (READING, COPYING), (READING, IN_HOST, IN_SLOT)]
)
def test_no_state_is_left_out(states: tuple[AdapterState, ...]) -> None:
    lives = Lives()
    with pytest.raises(AssertionError):
        lives.go(*states)
