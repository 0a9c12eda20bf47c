"""The adapters in host memory, at most so many. When one more comes, one of those goes whose tenants may lose one
(fair_shares.py): the one that is least needed soon, and among equals the one with the least credit (eviction.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lorafleet.workers.slots.eviction import Credits, Demand
from lorafleet.workers.slots.fair_shares import FairShares
from lorafleet.workers.slots.packed_adapter import PackedAdapter

log = logging.getLogger(__name__)

Need = Callable[[str], int]  # of a digest: how badly it is needed soon; only the least needed adapters may go


class CPUTier:
    def __init__(self, capacity: int, demand: Demand) -> None:
        self.capacity = capacity
        self._adapters: dict[str, PackedAdapter] = {}
        self._credits = Credits(demand)
        self._shares = FairShares(demand)

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
        adapter = self._adapters.get(digest)
        if adapter is not None:
            self._credits.use(digest, adapter.info.num_bytes)

    def charge(self, digest: str, tenant: str) -> None:
        """The tenant uses the adapter. Nothing where it is not here."""
        if digest in self._adapters:
            self._shares.charge(digest, tenant)

    def losers(self, tenant: str) -> set[str]:
        """The adapters of which one goes when the tenant brings in one more and there is no room."""
        return self._shares.losers(tenant, self._adapters)

    def add(self, adapter: PackedAdapter, need: Need, tenant: str = "") -> list[str]:
        """Returns the digests of those that had to go. tenant: who brings it in; "" is that of all without one."""
        digest, gone = adapter.info.digest, []
        self.remove(digest)
        while len(self._adapters) >= self.capacity:
            victim = min(self.losers(tenant), key=lambda d: (need(d), self._credits.of(d)))
            self._credits.evict(victim)
            self.remove(victim)
            gone.append(victim)
            log.info("adapter %s leaves CPU memory", victim[:12])
        self._adapters[digest] = adapter
        self._shares.charge(digest, tenant)
        self.touch(digest)
        return gone

    def remove(self, digest: str) -> None:
        self._adapters.pop(digest, None)
        self._shares.release(digest)
        self._credits.forget(digest)
