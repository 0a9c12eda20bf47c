"""A cache that evicts what has not been used for the longest time. Threads that share one need a lock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A mapping of bounded size. put() evicts the least recently used entries beyond max_entries, but never the newest.

    Args:
        may_evict: Returns whether an entry may be evicted. The cache grows beyond max_entries if none may.
    """

    def __init__(self, max_entries: int, may_evict: Callable[[K, V], bool] = lambda _key, _value: True) -> None:
        self._max_entries = max_entries
        self._may_evict = may_evict
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        """Returns whether the key has a value. This is not a use of it."""
        return key in self._values

    def items(self) -> list[tuple[K, V]]:
        """Returns the entries, the least recently used first. This is not a use of them."""
        return list(self._values.items())

    def get(self, key: K) -> V | None:
        """Returns the value and makes it the most recently used one, or returns None if the key has none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: K, value: V) -> list[V]:
        """Stores the value as the most recently used one, and returns the values that it has evicted."""
        self._values[key] = value
        self._values.move_to_end(key)
        evicted: list[V] = []
        while len(self._values) > self._max_entries and (oldest := self._evictable(key)) is not None:
            evicted.append(self._values.pop(oldest))
        return evicted

    def pop(self, key: K) -> V | None:
        """Removes the value and returns it, or returns None if the key has none."""
        return self._values.pop(key, None)

    def clear(self) -> None:
        self._values.clear()

    def _evictable(self, newest: K) -> K | None:
        return next((key for key, value in self._values.items() if key != newest and self._may_evict(key, value)), None)
