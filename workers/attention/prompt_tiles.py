"""Estimates how well the prompts of a step fill a GPU, by the tiles into which their queries are divided.

FlashInfer's FA3 gives each tile of 128 queries of a head to one program, which walks all keys of the tile. So a chunk
of a few hundred tokens with a long context leaves most of the GPU idle, or runs a second round of programs that is
nearly empty. FA2 divides the keys among programs too.
"""

from __future__ import annotations

TILE_QUERIES = 128  # queries of a program of FA3


def filled_share(query_lens: list[int], context_lens: list[int], num_heads: int, num_sms: int) -> float:
    """Returns the share of the GPU that computes while the programs of all prompts run, between 0 and 1.

    The longest programs start first, one on each multiprocessor. A round of programs takes as long as its longest one.
    """
    lens = sorted(zip(context_lens, query_lens, strict=True), reverse=True)
    work = duration = room = 0
    for context, queries in lens:
        tiles = num_heads * -(-queries // TILE_QUERIES)
        work += tiles * context
        if tiles > room:
            rounds = -(-(tiles - room) // num_sms)
            duration += rounds * context
            room += rounds * num_sms
        room -= tiles
    return work / (num_sms * duration)
