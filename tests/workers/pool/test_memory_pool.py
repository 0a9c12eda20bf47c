"""The pool decides between KV blocks and adapters. Its memory is plain: bytes that are marked with their holder."""

from __future__ import annotations

import math
import time

from lorafleet.workers.pool.group_layout import GroupLayout
from lorafleet.workers.pool.group_mover import GroupMove
from lorafleet.workers.pool.kv_groups import KVGroups
from lorafleet.workers.pool.memory_pool import CALM_S, DECIDE_S, PATIENCE_S, MemoryPool, PoolSizes
from lorafleet.workers.pool.pool_cost import PoolCosts
from lorafleet.workers.schedule.kv_cache import KVCacheManager, SequenceBlocks
from lorafleet.workers.slots.lora_memory import LoRAMemory

GROUP_BYTES, OWN_BYTES = 100, 50
LAYOUT = GroupLayout(blocks=4, part_bytes=(GROUP_BYTES,), num_groups=10)


class PlainMover:
    """Moves that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[GroupMove] = []

    def begin(self, move: GroupMove) -> None:
        self.begun.append(move)

    def take_done(self) -> list[GroupMove]:
        done, self.begun = self.begun, []
        return done

    def close(self) -> None:
        pass


class Users:
    """Adapters in regions: the worth of each region by its index."""

    def __init__(self) -> None:
        self.given: dict[int, float] = {}
        self.left: list[int] = []

    def worths(self, start: int, num_bytes: int) -> dict[int, float]:
        assert (start, num_bytes) == (OWN_BYTES, GROUP_BYTES)
        return self.given

    def leave(self, start: int, num_bytes: int) -> None:
        assert num_bytes == GROUP_BYTES
        self.left.append((start - OWN_BYTES) // GROUP_BYTES)


class Pool:
    """39 blocks in groups of 4, of which groups 3 to 8 can be lent, and 4 may be at a time."""

    def __init__(self) -> None:
        self.now_s = time.monotonic() + 100
        self.kv = KVCacheManager(LAYOUT.num_blocks - 1, 1, enable_prefix_caching=True)
        self.memory = LoRAMemory(OWN_BYTES)
        self.mover, self.users = PlainMover(), Users()
        self.saved: list[int] = []
        costs = PoolCosts(block_s=1.0, share=1.0)
        groups = KVGroups(self.kv, LAYOUT, 6, lambda _: None)
        sizes = PoolSizes(GROUP_BYTES, OWN_BYTES, most_lent=4, promised=1)
        self.pool = MemoryPool(
            groups, self.memory, self.mover, sizes, lambda: costs, self.saved.extend, lambda: self.now_s
        )

    def fill(self, num_blocks: int, start: int = 0) -> SequenceBlocks:
        blocks = self.kv.open(("", ""))
        assert self.kv.grow(blocks, num_blocks)
        self.kv.commit(blocks, [*range(start, start + num_blocks)], num_blocks)
        return blocks

    def bring(self, num_bytes: int, lost: float | None = None) -> bool:
        self.now_s += DECIDE_S
        return self.pool.bring(num_bytes, lost)

    def step(self, seconds: float = DECIDE_S) -> None:
        self.now_s += seconds
        self.pool.advance(self.users)


def test_an_adapter_waits_until_enough_groups_have_come() -> None:
    pool = Pool()
    assert pool.memory.most_bytes == OWN_BYTES + 4 * GROUP_BYTES
    assert pool.bring(150) and pool.pool.is_bringing
    assert pool.pool.bring(150, None), "it asks at each step"
    assert [(move.group, move.region, move.to_adapters) for move in pool.mover.begun] == [(3, 0, True), (4, 1, True)]
    assert pool.saved == [*range(12, 20)] and pool.kv.num_free == 31
    assert pool.memory.num_bytes == OWN_BYTES, "none has come yet"
    pool.step()
    assert pool.memory.free_ranges == [(0, OWN_BYTES + 2 * GROUP_BYTES)]
    assert (pool.pool.counts.lent, pool.pool.borrowed_bytes, pool.pool.num_blocks) == (2, 200, 8)


def test_no_more_is_lent_than_allowed() -> None:
    pool = Pool()
    assert not pool.bring(401)
    assert pool.bring(400)
    pool.step()
    assert not pool.bring(1)


def test_idle_adapters_leave_if_they_are_worth_less_than_cached_blocks() -> None:
    pool = Pool()
    blocks = pool.fill(39)
    pool.kv.release(blocks)
    worth = 4 / 130  # of a group that has been idle for about 100 s
    assert not pool.bring(100, lost=worth)
    assert pool.bring(100, lost=3 * worth)


def test_memory_comes_back_when_blocks_are_forgotten_that_are_worth_more() -> None:
    pool = Pool()
    assert pool.bring(200)
    pool.step()
    pool.users.given = {0: 1.0, 1: 0.001}
    pool.kv.release(pool.fill(31))
    running = pool.fill(2, start=100)
    pool.step()
    assert not pool.mover.begun, "it stays for a while"
    pool.step(CALM_S)
    assert [(move.region, move.to_adapters) for move in pool.mover.begun] == [(1, False)]
    assert pool.users.left == [1] and pool.memory.num_bytes == OWN_BYTES + GROUP_BYTES
    assert pool.kv.num_free == 29, "the group is on its way"
    pool.step()
    assert pool.kv.num_free == 33 and pool.pool.counts.returned == 1
    pool.step(CALM_S)
    assert not pool.mover.begun, "nothing was forgotten since"
    pool.kv.release(running)


def test_nothing_comes_back_that_is_worth_more_or_in_use() -> None:
    pool = Pool()
    assert pool.bring(200)
    pool.step()
    pool.users.given = {0: 1.0, 1: math.inf}
    pool.kv.release(pool.fill(31))
    pool.fill(2, start=100)
    pool.step(2 * CALM_S)
    assert not pool.mover.begun and not pool.users.left


def test_sequences_that_lack_blocks_get_them_from_adapters_that_are_hardly_used() -> None:
    pool = Pool()
    assert pool.bring(100)
    pool.step()
    pool.users.given = {0: 1.0}
    pool.fill(35)
    pool.step(2 * CALM_S)
    assert not pool.users.left
    pool.users.given = {0: 0.01}
    pool.step()
    assert pool.users.left == [0]


def test_sequences_are_made_to_wait_only_for_what_is_promised_to_adapters() -> None:
    pool = Pool()
    running = pool.fill(33)
    assert not pool.bring(101), "two groups, of six blocks"
    pool.kv.let_go(running.table[12:20])
    assert pool.bring(101)
    pool.step()
    pool.fill(6)
    assert not pool.bring(50) and pool.pool.num_blocks == 8


def test_a_group_in_use_is_lent_once_its_sequence_has_ended_if_there_is_no_other() -> None:
    pool = Pool()
    running = pool.fill(39)
    assert not pool.bring(50, lost=9.0), "other adapters leave"
    assert pool.pool.num_blocks == 0
    assert not pool.bring(50), "what is in use is not on its way yet"
    assert pool.pool.num_blocks == 4 and not pool.pool.is_bringing
    pool.step()
    assert not pool.mover.begun
    pool.kv.release(running)
    pool.step()
    assert [move.group for move in pool.mover.begun] == [3]
    assert pool.kv.num_free == 35
    assert pool.bring(50)


def test_a_group_whose_sequences_do_not_end_is_given_up_for_another() -> None:
    pool = Pool()
    running = [pool.fill(16), pool.fill(4, start=50), pool.fill(19, start=100)]
    assert not pool.bring(50)
    assert not pool.bring(50)
    pool.now_s += PATIENCE_S
    assert not pool.bring(50)
    assert pool.pool.num_blocks == 4, "one group at a time"
    pool.kv.release(running[1])
    pool.step()
    assert [move.group for move in pool.mover.begun] == [4]


def test_a_group_that_is_waited_for_is_no_longer_closed_once_another_is_free() -> None:
    pool = Pool()
    running = [pool.fill(16), pool.fill(4, start=50), pool.fill(19, start=100)]
    assert not pool.bring(50)
    pool.kv.release(running[1])
    assert pool.bring(50)
    assert [move.group for move in pool.mover.begun] == [4] and pool.pool.num_blocks == 4


def test_all_memory_comes_back_before_the_engine_sleeps() -> None:
    pool = Pool()
    running = pool.fill(39)
    assert not pool.bring(50)
    pool.pool.recall()
    assert pool.pool.num_blocks == 0, "nothing had left yet"
    pool.kv.release(running)
    assert pool.bring(150)
    pool.pool.recall()
    assert len(pool.mover.begun) == 2, "what is on its way arrives first"
    pool.step()
    pool.pool.recall()
    pool.step()
    assert (pool.pool.num_blocks, pool.kv.num_free, pool.memory.num_bytes) == (0, 39, OWN_BYTES)
