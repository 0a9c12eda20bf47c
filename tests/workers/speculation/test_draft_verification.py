"""The part of a draft that is right."""

from __future__ import annotations

import pytest

from lorafleet.workers.speculation.draft_verification import num_accepted


@pytest.mark.parametrize(
    ("drafts", "drawn", "count"),
    [((), [4, 9], 0), ((4, 5), [4, 5, 6, 9], 2), ((4, 5), [4, 6, 6], 1), ((4, 5), [5, 5, 5], 0)],
)
def test_drafts_are_accepted_up_to_the_first_that_is_wrong(
    drafts: tuple[int, ...], drawn: list[int], count: int
) -> None:
    assert num_accepted(drafts, drawn) == count
