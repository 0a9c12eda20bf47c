"""The choice between one step and two for the sum over the ranks. The sums themselves need GPUs."""

from __future__ import annotations

import pytest

from lorafleet.kernels.ranks.peer_areas import ALIGNMENT, MOST_RANKS
from lorafleet.workers.tp.row_parallel_sum import AREA_BYTES, SECOND_CROSSING_BYTES, saved_bytes, two_step_area_bytes

ROW_BYTES = 4096 * 2


def test_areas_are_aligned_for_any_number_of_ranks() -> None:
    assert all(two_step_area_bytes(num_ranks) % ALIGNMENT == 0 for num_ranks in range(2, MOST_RANKS + 1))


@pytest.mark.parametrize(("num_ranks", "first_rows"), [(3, 96), (4, 43), (8, 13)])
def test_two_steps_begin_where_the_saved_bytes_outweigh_the_second_crossing(num_ranks: int, first_rows: int) -> None:
    assert saved_bytes((first_rows - 1) * ROW_BYTES, num_ranks) < SECOND_CROSSING_BYTES
    assert saved_bytes(first_rows * ROW_BYTES, num_ranks) >= SECOND_CROSSING_BYTES
    assert first_rows * ROW_BYTES <= AREA_BYTES, "there is no sum that neither way has room for"


def test_two_steps_save_two_ranks_nothing() -> None:
    assert saved_bytes(64 << 20, 2) == 0
    one_step, two_steps = 3 * ROW_BYTES, 2 * 3 * ROW_BYTES // 4
    assert saved_bytes(ROW_BYTES, 4) == one_step - two_steps
