"""The tokens that a grammar forces, by what has been answered since it was asked."""

from __future__ import annotations

from lorafleet.workers.structured.forced_tokens import ForcedTokens

PROMPT = [1, 2]


def test_forced_tokens_follow_those_that_came_since() -> None:
    forced = ForcedTokens()
    assert forced.after(PROMPT, 2) == []
    forced.replace(2, [], [(0, [7, 8, 9])])
    assert forced.after(PROMPT, 2) == [7, 8, 9]
    assert forced.after([*PROMPT, 7], 3) == [8, 9]
    assert forced.after([*PROMPT, 7, 8, -1], 4) == [9], "the token in flight is not known"
    assert forced.after([*PROMPT, 7, 8, 9], 5) == []


def test_what_is_forced_behind_a_wrong_draft_is_dropped() -> None:
    forced = ForcedTokens()
    forced.replace(2, [4, 5, 6], [(1, [5]), (3, [7, 8])])
    assert forced.after([*PROMPT, 4], 3) == [5]
    assert forced.after([*PROMPT, 4, 5, 6], 5) == [7, 8]
    assert forced.after([*PROMPT, 4, 5, 9], 5) == []
    assert forced.after([*PROMPT, 3], 3) == []
    forced.replace(5, [], ())
    assert forced.after([*PROMPT, 4, 5, 6], 5) == []
