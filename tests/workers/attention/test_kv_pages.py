"""The block numbers of a step, in one row for the device."""

from __future__ import annotations

from array import array

import pytest

from lorafleet.workers.attention.kv_pages import join_blocks

TABLES = [
    [array("i", [3, 4]), array("i", [7]), array("i", [9, 1, 2])],  # Each sequence fills all of its blocks.
    [array("i", [3, 4, 8]), array("i", [7]), array("i", [9, 1, 2, 6])],  # Two have one block more.
    [[3, 4], array("i", [7]), [9, 1, 2]],
    [[3, 4], (7,), range(9, 12)],
]


@pytest.mark.parametrize("tables", TABLES)
def test_as_many_blocks_of_each_table_are_joined_as_its_sequence_fills(tables) -> None:
    joined = join_blocks(tables, [2, 1, 3])
    assert joined.dtype == "int32"
    assert joined.tolist() == [block for table, count in zip(tables, [2, 1, 3], strict=True) for block in table[:count]]


def test_a_step_without_blocks_has_an_empty_row() -> None:
    assert join_blocks([[]], [0]).tolist() == []
