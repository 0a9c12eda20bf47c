"""Remembers which replicas held an adapter in memory until recently, whose nodes' caches probably still have it."""

from __future__ import annotations

from lorafleet.protocol.lru_cache import LRUCache

MAX_ADAPTERS = 100_000
MAX_REPLICAS = 3  # Most replicas that are remembered for one adapter.


class FormerHolders:
    """The replicas that held an adapter in memory until recently, the latest first."""

    def __init__(self, max_adapters: int = MAX_ADAPTERS) -> None:
        self._replicas: LRUCache[str, tuple[str, ...]] = LRUCache(max_adapters)

    def of(self, digest: str) -> tuple[str, ...]:
        return self._replicas.get(digest) or ()

    def record(self, digest: str, replica_id: str) -> None:
        others = [other for other in self.of(digest) if other != replica_id]
        self._replicas.put(digest, (replica_id, *others[: MAX_REPLICAS - 1]))
