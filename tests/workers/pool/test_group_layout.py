"""Groups of KV blocks whose memory consists of whole pages."""

from __future__ import annotations

from lorafleet.workers.pool.group_layout import PAGE_BYTES, GroupLayout


def test_a_group_of_an_8b_model_has_64_blocks() -> None:
    layout = GroupLayout.of([16 * 8 * 128 * 2] * 64, 1000)
    assert (layout.blocks, layout.num_groups, layout.num_blocks) == (64, 15, 960)
    assert layout.part_bytes == (PAGE_BYTES,) * 64 and layout.group_bytes == 64 * PAGE_BYTES


def test_pages_are_whole_in_every_tensor() -> None:
    sizes = [16 * 1 * 576 * 2, 16 * 8 * 128 * 2, 16 * 2 * 96]
    layout = GroupLayout.of(sizes, 10**6)
    assert all(part % PAGE_BYTES == 0 for part in layout.part_bytes)
    assert layout.part_bytes == tuple(size * layout.blocks for size in sizes)


def test_the_first_and_the_last_group_and_the_kept_blocks_are_never_lent() -> None:
    layout = GroupLayout.of([PAGE_BYTES // 4], 40)
    assert (layout.blocks, layout.num_groups) == (4, 10)
    assert layout.most_lendable(0) == 8
    assert layout.most_lendable(31) == 2, "two groups of four beside 31 blocks and the one for padding"
    assert layout.most_lendable(39) == 0
    assert layout.first_lendable(2) == 7
