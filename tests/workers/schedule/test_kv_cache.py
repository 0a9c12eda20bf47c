from __future__ import annotations

import random

import pytest

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


def test_a_block_that_could_not_be_announced_is_not_known():
    kv = KVCacheManager(num_blocks=16, block_size=4, enable_prefix_caching=True)
    announced = []

    def announce(node, *_):
        announced.append(node)
        if len(announced) == 2:
            raise OSError("the second block")

    kv.on_known = announce
    blocks = kv.open("a")
    kv.grow(blocks, 12)
    with pytest.raises(OSError, match="the second block"):
        kv.commit(blocks, TOKENS, 12)
    kv.commit(blocks, TOKENS, 12)
    assert len(announced) == 4  # the second block once more
    assert announced[0] == blocks.nodes[0] and announced[2:] == blocks.nodes[1:]


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
    assert len(kv._roots) <= 4, "8 blocks know two each"
    last = kv.open("salt 99")
    assert kv.reuse_prefix(last, TOKENS[:9]) == 8
    kv.release(last)


class CountingTokens(list[int]):
    """Tokens that count how many of them were looked up."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_prefix_that_was_found_is_not_looked_up_again_but_where_it_was_forgotten_or_has_grown():
    kv = KVCacheManager(num_blocks=12, block_size=4, enable_prefix_caching=True)
    kv.release(filled(kv, "a", TOKENS[:32]))
    tokens, waiting = CountingTokens(TOKENS), kv.open("a")
    found = kv.find_prefix(waiting, tokens)
    assert (len(found.table), tokens.num_read) == (8, 36)
    for _ in range(5):
        assert kv.find_prefix(waiting, tokens, found) is found
    assert (len(found.table), tokens.num_read) == (8, 36 + 5 * 4)
    kv.release(filled(kv, "b", TOKENS[:24]))  # takes the last two blocks of the prefix
    assert len(kv.find_prefix(waiting, tokens, found).table) == 6
    kv.release(filled(kv, "a", TOKENS[:28]))
    assert len(kv.find_prefix(waiting, tokens, found).table) == 7
    assert kv.reuse_prefix(waiting, tokens, found) == 28


def test_what_a_waiting_sequence_has_found_is_what_it_would_find_now():
    rng = random.Random(4)
    kv = KVCacheManager(num_blocks=24, block_size=4, enable_prefix_caching=True)
    prompts = [(rng.choice("ab"), [rng.choice((1, 2)) for _ in range(rng.randrange(4, 40))]) for _ in range(12)]
    waiting = [(kv.open(salt), tokens) for salt, tokens in prompts]
    found = [kv.find_prefix(blocks, tokens) for blocks, tokens in waiting]
    live = []
    for _ in range(3000):
        if live and (rng.random() < 0.45 or kv.num_free < 6):
            kv.release(live.pop(rng.randrange(len(live))))
        else:
            salt, tokens = rng.choice(prompts)
            blocks = kv.open(salt)
            kv.reuse_prefix(blocks, tokens)
            if kv.grow(blocks, len(tokens)):
                kv.commit(blocks, tokens, len(tokens))
                live.append(blocks)
            else:
                kv.release(blocks)
        i = rng.randrange(len(waiting))
        blocks, tokens = waiting[i]
        found[i] = kv.find_prefix(blocks, tokens, found[i])
        fresh = kv.find_prefix(blocks, tokens)
        assert (found[i].table, found[i].nodes) == (fresh.table, fresh.nodes)
        trial = kv.open(prompts[i][0])
        kv.reuse_prefix(trial, tokens)
        assert (kv.num_left(len(tokens), found[i]) >= 0) == kv.grow(trial, len(tokens))
        kv.release(trial)


def test_the_prefix_of_a_sequence_that_waits_is_taken_for_others_last():
    kv = KVCacheManager(num_blocks=300, block_size=4, enable_prefix_caching=True)
    kv.release(filled(kv, "a", TOKENS))
    waiting = kv.open("a")
    found = kv.find_prefix(waiting, TOKENS)
    for i in range(200):  # other prefixes, which are more than the cache holds
        kv.release(filled(kv, f"other {i}", TOKENS))
        kv.refresh(found)
    assert len(kv.find_prefix(waiting, TOKENS, found).table) == 9
    assert kv.reuse_prefix(waiting, TOKENS, found) == 36


def test_the_time_is_known_since_which_no_prompt_in_use_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lorafleet.workers.schedule.kv_cache.time.monotonic", lambda: now[0])
    kv = KVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=True)
    for first in (0, 50):
        blocks = kv.open("salt")
        tokens = list(range(first, first + 8))
        assert kv.grow(blocks, 8)
        kv.commit(blocks, tokens, 8)
        now[0] += 10.0
        kv.release(blocks)
    assert kv.counts.forgotten_s == 0.0
    third = kv.open("salt")
    assert kv.grow(third, 8)
    assert kv.counts.forgotten_s == 110.0, "when the first prompt was in use"
    kv.flush()
    assert kv.counts.forgotten_s == 120.0
