"""A cache that evicts what has not been used for the longest time."""

from __future__ import annotations

from lorafleet.protocol.lru_cache import LRUCache


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache: LRUCache[str, int] = LRUCache(2)
    assert cache.put("a", 1) == cache.put("b", 2) == []
    assert cache.get("a") == 1 and "b" in cache
    assert cache.put("c", 3) == [2], "a look whether a key is there is not a use of it"
    assert cache.items() == [("a", 1), ("c", 3)] and cache.get("b") is None


def test_a_new_value_of_a_key_is_a_use_of_it_and_evicts_nothing() -> None:
    cache: LRUCache[str, int] = LRUCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.put("a", 3) == []
    assert cache.items() == [("b", 2), ("a", 3)]
    assert cache.pop("b") == 2 and cache.pop("b") is None and len(cache) == 1
    cache.clear()
    assert cache.items() == []


def test_entries_that_may_not_be_evicted_stay_beyond_the_bound_until_they_may() -> None:
    in_use = {"a", "b"}
    cache: LRUCache[str, str] = LRUCache(1, lambda key, _: key not in in_use)
    assert cache.put("a", "A") == cache.put("b", "B") == []
    assert cache.put("c", "C") == [], "the newest is never evicted"
    in_use.clear()
    assert cache.put("c", "C") == ["A", "B"] and len(cache) == 1
