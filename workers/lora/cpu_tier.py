"""The adapters in host memory, at most so many. When one more comes, the one goes that is cheapest to bring back among
those not used lately.

GreedyDual (Young, SODA 1991): an adapter's credit is the present floor plus its cost, the floor is the last victim's
credit. With equal costs that is LRU; one that takes four times as long to load outlives about four times as much
silence. The cost is the size: reading, hashing and packing all go by bytes, and the tier's capacity counts adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lorafleet.workers.lora.packed_adapter import PackedAdapter

log = logging.getLogger(__name__)

Need = Callable[[str], int]  # of a digest: how badly it is needed soon; only the least needed adapters may go


class CPUTier:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._adapters: dict[str, PackedAdapter] = {}  # least recently used first
        self._credit: dict[str, int] = {}
        self._floor = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def digests(self) -> list[str]:
        return list(self._adapters)

    @property
    def num_bytes(self) -> int:
        """Over all ranks."""
        return sum(adapter.info.num_bytes for adapter in self._adapters.values())

    def get(self, digest: str) -> PackedAdapter | None:
        return self._adapters.get(digest)

    def touch(self, digest: str) -> None:
        """The adapter is used. Nothing where it is not here."""
        adapter = self._adapters.pop(digest, None)
        if adapter is not None:
            self._adapters[digest] = adapter
            self._credit[digest] = self._floor + adapter.info.num_bytes

    def add(self, adapter: PackedAdapter, need: Need) -> list[str]:
        """The digests of those that had to go."""
        digest, gone = adapter.info.digest, []
        self.remove(digest)
        while len(self._adapters) >= self.capacity:
            victim = min(self._adapters, key=lambda d: (need(d), self._credit[d]))
            self._floor = max(self._floor, self._credit[victim])
            self.remove(victim)
            gone.append(victim)
            log.info("adapter %s leaves CPU memory", victim[:12])
        self._adapters[digest] = adapter
        self.touch(digest)
        return gone

    def remove(self, digest: str) -> None:
        self._adapters.pop(digest, None)
        self._credit.pop(digest, None)
