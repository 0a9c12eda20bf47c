from __future__ import annotations

import pytest

from lorafleet.workers.schedule.step_tiles import StepTiles

TILES = StepTiles((16, 64, 128, 512), 128)


def test_a_step_computes_the_tokens_of_its_graph():
    assert [TILES.tokens(count) for count in (1, 16, 17, 128, 129, 512, 513)] == [16, 16, 64, 128, 512, 512, 513]
    assert StepTiles().tokens(17) == 17


@pytest.mark.parametrize(("count", "tiles"), [(1, 1), (128, 1), (129, 2), (300, 3)])
def test_each_tile_of_queries_walks_all_keys_up_to_its_own(count, tiles):
    assert TILES.pairs(count, 1000) == sum(128 * (1000 + 128 * (tile + 1)) for tile in range(tiles))
    assert StepTiles().pairs(count, 1000) == sum(1001 + i for i in range(count))


def test_a_chunk_is_filled_up_to_the_first_border_that_makes_it_longer():
    assert TILES.filled(64, 0) == 64  # the graph's
    assert TILES.filled(65, 40) == 128 - 40
    assert TILES.filled(64, 100) == 128  # the tile's, in a graph of 512
    assert StepTiles().filled(64, 100) == 64


def test_the_edges_fill_a_graph_and_tiles():
    assert list(TILES.edges(300, 32)) == [96, 256]
    assert list(TILES.edges(100, 512)) == [0, 0]
    assert list(StepTiles().edges(300, 32)) == [300]
