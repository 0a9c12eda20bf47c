from __future__ import annotations

import random

from lorafleet.workers.schedule.kv_cache import KVCacheManager

TOKENS = list(range(100, 140))


def filled(kv: KVCacheManager, salt: str, tokens: list[int]):
    blocks = kv.open(salt)
    assert kv.grow(blocks, len(tokens))
    kv.commit(blocks, tokens, len(tokens))
    return blocks


def test_a_finished_prefix_is_found_again_but_for_its_last_token():
    kv = KVCacheManager(num_blocks=16, block_size=4, enable_prefix_caching=True)
    first = filled(kv, "a", TOKENS[:16])
    table = list(first.table)
    kv.release(first)
    again = kv.open("a")
    assert kv.reuse_prefix(again, TOKENS[:16]) == 12
    assert list(again.table) == table[:3]


def test_another_adapter_never_sees_the_prefix():
    kv = KVCacheManager(num_blocks=16, block_size=4, enable_prefix_caching=True)
    kv.release(filled(kv, "a", TOKENS))
    assert kv.reuse_prefix(kv.open("b"), TOKENS) == 0
    assert kv.reuse_prefix(kv.open("a"), TOKENS) == 36


def test_a_shared_block_is_not_given_away_while_anyone_uses_it():
    kv = KVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=True)
    first = filled(kv, "a", TOKENS[:8])
    second = kv.open("a")
    assert kv.reuse_prefix(second, TOKENS[:9]) == 8
    kv.release(first)
    assert kv.num_free == 2
    greedy = kv.open("b")
    assert not kv.grow(greedy, 12)
    assert not greedy.table
    assert kv.grow(greedy, 8)
    assert not set(greedy.table) & set(second.table)


def test_an_overwritten_block_is_forgotten():
    kv = KVCacheManager(num_blocks=2, block_size=4, enable_prefix_caching=True)
    kv.release(filled(kv, "a", TOKENS[:8]))
    kv.release(filled(kv, "b", TOKENS[:8]))
    assert kv.reuse_prefix(kv.open("a"), TOKENS[:9]) == 0


def test_switched_off_it_finds_nothing():
    kv = KVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=False)
    kv.release(filled(kv, "a", TOKENS[:8]))
    assert kv.reuse_prefix(kv.open("a"), TOKENS[:9]) == 0


def test_random_use_never_leaks_or_mixes_blocks():
    rng = random.Random(3)
    kv = KVCacheManager(num_blocks=24, block_size=4, enable_prefix_caching=True)
    content: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> what a real cache would hold
    live = []
    for _ in range(3000):
        if live and (rng.random() < 0.45 or kv.num_free < 4):
            blocks, _ = live.pop(rng.randrange(len(live)))
            kv.release(blocks)
            continue
        salt, tokens = rng.choice("ab"), [rng.choice((1, 2)) for _ in range(rng.randrange(1, 20))]
        blocks = kv.open(salt)
        hit = kv.reuse_prefix(blocks, tokens)
        for i in range(hit // 4):
            assert content[blocks.table[i]] == (salt, tuple(tokens[: (i + 1) * 4]))
        if not kv.grow(blocks, len(tokens)):
            kv.release(blocks)
            continue
        for i in range(hit // 4, len(blocks.table)):
            content[blocks.table[i]] = (salt, tuple(tokens[: (i + 1) * 4]))
        kv.commit(blocks, tokens, len(tokens))
        live.append((blocks, tokens))
    for blocks, _ in live:
        kv.release(blocks)
    assert kv.num_free == 24


def test_blocks_before_an_activated_adapter_begins_are_the_base_s_and_those_behind_are_its_own():
    kv = KVCacheManager(num_blocks=32, block_size=4, enable_prefix_caching=True)
    kv.release(filled(kv, "", TOKENS))
    activated = kv.open("a", "", 14)  # in the fourth block
    assert kv.reuse_prefix(activated, TOKENS) == 12
    assert kv.grow(activated, len(TOKENS))
    kv.commit(activated, TOKENS, len(TOKENS))
    kv.release(activated)
    assert kv.reuse_prefix(kv.open("a", "", 14), TOKENS) == 36
    assert kv.reuse_prefix(kv.open("b", "", 14), TOKENS) == 12
    assert kv.reuse_prefix(kv.open("a"), TOKENS) == 0
    assert kv.reuse_prefix(kv.open("a", "", 19), TOKENS) == 16, "the same adapter, invoked later"


def test_the_base_finds_what_an_activated_adapter_computed_before_it_began():
    kv = KVCacheManager(num_blocks=32, block_size=4, enable_prefix_caching=True)
    activated = kv.open("a", "", 14)
    assert kv.grow(activated, len(TOKENS))
    kv.commit(activated, TOKENS, len(TOKENS))
    assert kv.reuse_prefix(kv.open(""), TOKENS) == 12


def test_a_salt_that_nothing_is_known_of_takes_no_memory():
    kv = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=True)
    for i in range(100):
        kv.release(filled(kv, f"salt {i}", TOKENS[:9]))
    assert len(kv._roots) == len(kv._salts) == len(kv._root_users) <= 4, "8 blocks know two each"
    last = kv.open("salt 99")
    assert kv.reuse_prefix(last, TOKENS[:9]) == 8
    kv.release(last)
