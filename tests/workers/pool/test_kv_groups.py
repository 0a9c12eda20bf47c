"""Groups of KV blocks leave the prefix cache and come back."""

from __future__ import annotations

import time

import pytest

from lorafleet.workers.pool.group_layout import GroupLayout
from lorafleet.workers.pool.kv_groups import KVGroups
from lorafleet.workers.pool.pool_cost import AdapterUse, PoolCosts
from lorafleet.workers.schedule.kv_cache import KVCacheManager, SequenceBlocks

COSTS = PoolCosts(block_s=1.0, share=1.0)
LAYOUT = GroupLayout(blocks=4, part_bytes=(8,), num_groups=6)
TOKENS = [*range(100)]


class Cache:
    """23 blocks of one token in groups of 4, of which groups 1 to 4 can be lent."""

    def __init__(self, **uses: AdapterUse) -> None:
        self.kv = KVCacheManager(LAYOUT.num_blocks - 1, 1, enable_prefix_caching=True)
        self.groups = KVGroups(self.kv, LAYOUT, 4, uses.get)

    def fill(self, num_blocks: int, digest: str = "", start: int = 0) -> SequenceBlocks:
        blocks = self.kv.open(("tenant", digest))
        assert self.kv.grow(blocks, num_blocks)
        self.kv.commit(blocks, TOKENS[start : start + num_blocks], num_blocks)
        return blocks

    def cheapest(self, num_groups: int = 1) -> list[int]:
        return [group for _, group in self.groups.cheapest(num_groups, COSTS, time.monotonic() + 1)]


def test_empty_groups_are_lent_first_and_nobody_gets_their_blocks() -> None:
    cache = Cache()
    cache.kv.release(cache.fill(8))
    assert cache.cheapest(9) == [2, 3, 4, 1], "group 1 holds a prefix"
    cache.groups.close(2)
    assert cache.groups.is_left(2) and cache.groups.num_blocks == 4
    assert cache.kv.num_free == 19
    taken = cache.fill(19, start=20)
    assert not set(taken.table) & {8, 9, 10, 11}
    assert not cache.kv.grow(cache.kv.open("x"), 1)


def test_a_returned_group_is_used_again_and_holds_nothing() -> None:
    cache = Cache()
    cache.kv.release(cache.fill(8))
    cache.groups.close(1)
    assert cache.groups.forget(1) == range(4, 8)
    cache.groups.open(1)
    assert cache.kv.num_free == 23 and cache.groups.num_blocks == 0
    assert cache.kv.reuse_prefix(cache.kv.open(("tenant", "")), TOKENS[:9]) == 4


def test_a_group_in_use_is_not_lent_before_its_sequences_have_ended() -> None:
    cache = Cache()
    running = cache.fill(6)
    sharing = cache.kv.open(("tenant", ""))
    assert cache.kv.reuse_prefix(sharing, TOKENS[:7]) == 6
    assert 1 not in cache.cheapest(9)
    cache.groups.close(1)
    assert not cache.groups.is_left(1)
    cache.kv.release(running)
    assert not cache.groups.is_left(1), "its blocks are shared"
    cache.kv.release(sharing)
    assert cache.groups.is_left(1)
    assert cache.kv.num_free == 19
    assert cache.groups.forget(1) == range(4, 8)
    assert cache.kv.reuse_prefix(cache.kv.open(("tenant", "")), TOKENS[:9]) == 4


def test_a_group_that_is_opened_while_it_is_used_is_as_it_was() -> None:
    cache = Cache()
    running = cache.fill(6)
    cache.groups.close(1)
    cache.groups.open(1)
    assert cache.kv.num_free == 17
    cache.kv.release(running)
    assert cache.kv.num_free == 23
    assert cache.kv.reuse_prefix(cache.kv.open(("tenant", "")), TOKENS[:9]) == 6


def test_blocks_of_a_cold_adapter_leave_before_those_of_an_absent_one_and_of_the_base() -> None:
    cache = Cache(cold=AdapterUse(0.0), absent=AdapterUse(9.0, missing_bytes=50 << 30))
    taken = [
        cache.fill(4, digest, start) for start, digest in ((0, ""), (10, ""), (20, "absent"), (30, "cold"), (40, ""))
    ]
    for blocks in reversed(taken):
        cache.kv.release(blocks)
    assert cache.cheapest(4)[:2] == [3, 2]


def test_one_more_group_is_worth_what_the_cache_forgets_next() -> None:
    cache = Cache()
    now_s = time.monotonic() + 1
    assert cache.groups.worth_of_shortage(COSTS, now_s) == 0
    cache.kv.release(cache.fill(23))
    assert cache.groups.worth_of_shortage(COSTS, now_s) == 0, "nothing was forgotten yet"
    running = cache.fill(2, start=50)
    worth = cache.groups.worth_of_shortage(COSTS, now_s)
    assert worth == pytest.approx(4 / 31, rel=0.05)
    assert cache.groups.worth_of_shortage(COSTS, now_s) == 0, "and nothing since"
    cache.groups.close(3)
    assert cache.groups.worth_of_shortage(COSTS, now_s) == 0, "what leaves with a group is not a shortage"
    assert running.table


def test_blocks_that_sequences_lack_are_worth_as_much_as_those_in_use() -> None:
    kv = KVCacheManager(63, 1, enable_prefix_caching=True)
    groups = KVGroups(kv, GroupLayout(4, (8,), 16), 8, {}.get)
    taken = kv.open("a")
    assert kv.grow(taken, 63)
    assert groups.num_spare == -1
    assert groups.worth_of_shortage(COSTS, time.monotonic()) == pytest.approx(4 / 30)


def test_the_group_with_the_fewest_blocks_in_use_is_closed_if_none_is_free() -> None:
    cache = Cache()
    taken = cache.fill(23)
    cache.kv.let_go(taken.table[5:8])
    assert cache.cheapest() == []
    assert cache.groups.least_used() == 1
    cache.groups.close(1)
    assert cache.groups.least_used() == 2
