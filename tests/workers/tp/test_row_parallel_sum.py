"""The choice between one step and two for the sum over the ranks. The sums themselves need GPUs."""

from __future__ import annotations

import pytest

from lorafleet.kernels.ranks.peer_areas import ALIGNMENT, MOST_RANKS
from lorafleet.workers.tp.row_parallel_sum import (
    ONE_STEP_BYTES,
    SECOND_CROSSING_BYTES,
    two_step_area_bytes,
    two_steps_from,
)

ROW_BYTES = 4096 * 2


@pytest.mark.parametrize("num_ranks", range(3, MOST_RANKS + 1))
def test_two_steps_begin_where_they_save_what_the_second_crossing_costs(num_ranks: int) -> None:
    from_bytes = two_steps_from(num_ranks)
    received_in_one, received_in_two = (num_ranks - 1) * from_bytes, 2 * (num_ranks - 1) * from_bytes / num_ranks
    assert received_in_one - received_in_two == pytest.approx(SECOND_CROSSING_BYTES, rel=1e-3)


def test_two_steps_begin_earlier_with_more_ranks() -> None:
    assert [two_steps_from(num_ranks) // ROW_BYTES for num_ranks in (2, 3, 4, 8)] == [128, 72, 32, 9]


@pytest.mark.parametrize("num_ranks", range(2, MOST_RANKS + 1))
def test_one_step_has_room_for_all_sums_below(num_ranks: int) -> None:
    assert two_steps_from(num_ranks) <= ONE_STEP_BYTES
    assert two_step_area_bytes(num_ranks) >= 2 * two_steps_from(num_ranks) // num_ranks
    assert two_step_area_bytes(num_ranks) % ALIGNMENT == 0
