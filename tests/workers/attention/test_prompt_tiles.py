from __future__ import annotations

import pytest

from lorafleet.workers.attention.prompt_tiles import LONG_CONTEXT, MOST_PART_QUERIES, best_parts, longest_walk


@pytest.mark.parametrize(("tiles", "keys"), [(1, 1000), (132, 1000), (133, 2000), (264, 2000), (265, 3000)])
def test_tiles_are_walked_in_rounds(tiles: int, keys: int) -> None:
    assert longest_walk([(1000, tiles)], 132) == keys


def test_short_walks_take_the_places_that_long_ones_leave() -> None:
    assert longest_walk([(10, 100), (1000, 32)], 132) == 1000
    assert longest_walk([(1000, 32), (10, 101)], 132) == 1010


@pytest.mark.parametrize(("queries", "parts"), [(64, 4), (128, 4), (256, 2), (384, 4), (512, 1), (2048, 1)])
def test_a_long_context_is_divided_so_that_the_gpu_is_full(queries: int, parts: int) -> None:
    assert best_parts([queries], [100_000], 32, 132) == parts


def test_a_context_is_not_divided_where_that_gains_little() -> None:
    assert best_parts([256], [256 + LONG_CONTEXT - 1], 32, 132) == 1
    assert best_parts([512] * 8, [512] * 8, 32, 132) == 1


def test_short_prompts_beside_a_long_one_do_not_hide_that_the_rest_of_the_gpu_waits() -> None:
    assert best_parts([128, 16], [100_000, 16], 32, 132) == best_parts([128], [100_000], 32, 132)
    assert best_parts([128] * 4, [100_000] * 4, 32, 132) == 1


def test_few_heads_are_divided_further() -> None:
    assert best_parts([128], [100_000], 8, 132) == 8


def test_parts_have_no_more_queries_than_there_is_memory_for() -> None:
    for count in (16, 128, 300, 512, 640, 1100, 2048):
        for heads in (1, 8, 32):
            parts = best_parts([count, 99], [100_000, 99], heads, 132)
            assert parts == 1 or parts * count <= MOST_PART_QUERIES
    assert best_parts([2048], [100_000], 1, 132) == 2
