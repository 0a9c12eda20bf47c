"""Decides whether a step's prompts are computed with divided contexts, by the tiles into which queries are divided.

FlashInfer's FA3 gives each tile of 128 queries of a head to one multiprocessor, which walks all keys of the tile. A
chunk of a few hundred tokens with a long context has too few tiles, so most of the GPU waits for the longest walk. If
the context is divided, each tile has a walk for each part, and more multiprocessors work.
"""

from __future__ import annotations

from collections.abc import Iterable

TILE_QUERIES = 128  # queries of a program of FA3
LONG_CONTEXT = 4096  # keys in front of a chunk from which dividing them is worth more launches
PARTS = (2, 3, 4, 6, 8)  # numbers of parts that are considered
MOST_PART_QUERIES = 4096  # sum of the queries of all parts, for whose results there is memory
MERGE_KEYS = 2048  # number of keys that a tile walks while the launches for parts, and of their merge, take place


def longest_walk(tiles: Iterable[tuple[int, int]], num_sms: int) -> int:
    """Returns the number of keys that the busiest multiprocessor walks.

    The longest walks start first, one on each multiprocessor. A round of walks takes as long as its longest one.

    Args:
        tiles: Pairs of a number of keys, and of tiles that walk so many.
    """
    duration = room = 0
    for num_keys, count in sorted(tiles, reverse=True):
        if count > room:
            rounds = -(-(count - room) // num_sms)
            duration += rounds * num_keys
            room += rounds * num_sms
        room -= count
    return duration


def walk_of(query_lens: list[int], context_lens: list[int], parts: int, num_heads: int, num_sms: int) -> int:
    """Returns the number of keys that the busiest multiprocessor walks for a step's prompts, with long contexts in this
    number of parts."""
    tiles = []
    for queries, context in zip(query_lens, context_lens, strict=True):
        count, before = num_heads * -(-queries // TILE_QUERIES), context - queries
        if parts > 1 and before >= LONG_CONTEXT:
            tiles += [(before // parts, count * parts), (queries, count)]
        else:
            tiles.append((context, count))
    return longest_walk(tiles, num_sms) + (MERGE_KEYS if parts > 1 else 0)


def best_parts(query_lens: list[int], context_lens: list[int], num_heads: int, num_sms: int) -> int:
    """Returns the number of parts into which the long contexts of a step's prompts should be divided; 1 for none."""
    lens = zip(query_lens, context_lens, strict=True)
    num_long = sum(queries for queries, context in lens if context - queries >= LONG_CONTEXT)
    parts = [count for count in PARTS if 0 < count * num_long <= MOST_PART_QUERIES]
    return min((1, *parts), key=lambda count: walk_of(query_lens, context_lens, count, num_heads, num_sms))
