"""How many drafts of each sequence are right, as the device finds it out."""

from __future__ import annotations

import pytest
import torch

from lorafleet.workers.device.draft_verification import count_accepted


@pytest.mark.parametrize(
    ("drafts", "drawn", "count"),
    [((), [4, 9], 0), ((4, 5), [4, 5, 6, 9], 2), ((4, 5), [4, 6, 6], 1), ((4, 5), [5, 5, 5], 0), ((9, 5), [4, 5], 0)],
)
def test_drafts_are_accepted_up_to_the_first_that_is_wrong(
    drafts: tuple[int, ...], drawn: list[int], count: int
) -> None:
    """Sequences with three drafts that are right come before and behind."""
    num_rows = 1 + len(drafts)
    token_B = torch.tensor([1, 7, 7, 7, 1, *drafts, 1, 7, 7, 7])
    drawn_B = torch.tensor([7, 7, 7, 3, *[*drawn, 0][:num_rows], 7, 7, 7, 4])
    first_S, count_S = torch.tensor([0, 4, 4 + num_rows]), torch.tensor([3, len(drafts), 3])
    assert count_accepted(token_B, drawn_B, first_S, count_S, most=3).tolist() == [3, count, 3]
