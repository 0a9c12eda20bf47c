from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lorafleet.workers.kv_events.block_events import BlockEvents
from lorafleet.workers.schedule.kv_cache import KVCacheManager, SequenceBlocks

TOKENS = list(range(100, 112))


def test_a_block_of_which_two_copies_are_known_is_removed_with_the_last() -> None:
    kv = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=True)
    published: list[Any] = []
    publisher: Any = SimpleNamespace(publish=published.extend)
    events = BlockEvents(kv, list, publisher)

    def compute(num_tokens: int) -> SequenceBlocks:
        blocks = kv.open(("", ""))
        assert kv.grow(blocks, num_tokens)
        kv.commit(blocks, TOKENS, num_tokens)
        return blocks

    first, second = compute(8), compute(8)
    assert kv.grow(second, 12)
    kv.commit(second, TOKENS, 12)  # Behind the blocks of the first, which are the known ones.
    kv.release(first)
    kv.flush()
    third = compute(12)
    events.step_ended()
    stored = [known for event in published if hasattr(event, "token_ids") for known in event.block_hashes]
    assert len(stored) == 5
    assert len(set(stored)) == 3
    published.clear()
    kv.release(second)
    kv.flush()
    events.step_ended()
    assert published == []
    kv.release(third)
    kv.flush()
    events.step_ended()
    assert [type(event).__name__ for event in published] == ["AllBlocksCleared"]
