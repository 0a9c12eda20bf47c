"""Holds a limited number of adapters in host memory.

When the tier is full, one adapter is evicted for each new one. It belongs to a tenant that may lose one
(fair_shares.py). Among these adapters, the one that is least needed soon is evicted. Among equals, it is the one with
the least credit (eviction.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from lorafleet.workers.slots.adapter_lives import AdapterLives, AdapterState
from lorafleet.workers.slots.eviction import Credits, Demand
from lorafleet.workers.slots.fair_shares import FairShares
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.tp.rank_messages import ForgetShard, Order

log = logging.getLogger(__name__)

Need = Callable[[str], int]  # Returns how badly a digest is needed soon; only the least needed adapters may be evicted.


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
        """Bytes of these adapters over all ranks."""
        return sum(adapter.info.num_bytes for adapter in self._adapters.values())

    def get(self, digest: str) -> PackedAdapter | None:
        return self._adapters.get(digest)

    def touch(self, digest: str) -> None:
        """Records a use of the adapter. Does nothing if the adapter is not in this tier."""
        adapter = self._adapters.get(digest)
        if adapter is not None:
            self._credits.use(digest, adapter.info.num_bytes)

    def charge(self, digest: str, tenant: str) -> None:
        """Charges the adapter to a tenant that uses it. Does nothing if the adapter is not in this tier."""
        if digest in self._adapters:
            self._shares.charge(digest, tenant)

    def losers(self, tenant: str) -> set[str]:
        """Returns the adapters of which one is evicted when the tenant adds one and the tier is full."""
        return self._shares.losers(tenant, self._adapters)

    def add(self, adapter: PackedAdapter, need: Need, tenant: str = "") -> list[str]:
        """Adds an adapter and returns the digests of those evicted for it.

        `tenant` is the tenant that brings the adapter in. "" stands for all callers without a tenant.
        """
        digest, gone = adapter.info.digest, []
        self.remove(digest)
        while len(self._adapters) >= self.capacity:
            victim = min(self.losers(tenant), key=lambda d: (need(d), self._credits.of(d)))
            self._credits.evict(victim)
            self.remove(victim)
            gone.append(victim)
            log.info("adapter %s evicted from host memory", victim[:12])
        self._adapters[digest] = adapter
        self._shares.charge(digest, tenant)
        self.touch(digest)
        return gone

    def remove(self, digest: str) -> None:
        self._adapters.pop(digest, None)
        self._shares.release(digest)
        self._credits.forget(digest)


@dataclass(slots=True)
class LoadCounts:
    loads: int = 0
    failures: int = 0
    seconds: float = 0.0
    cpu_evictions: int = 0


class HostCopies:
    """Puts loaded adapters into the tier and removes them, on all ranks of a replica, and records it. `send` sends an
    order to the other ranks."""

    def __init__(self, cpu: CPUTier, lives: AdapterLives, send: Callable[[Order], None], counts: LoadCounts) -> None:
        self._cpu = cpu
        self._lives = lives
        self._send = send
        self._counts = counts

    def admit(self, adapter: PackedAdapter, need: Need, tenant: str) -> None:
        """Adds an adapter that all ranks have read, and evicts others if there is no room."""
        self._counts.loads += 1
        _log_load(adapter)
        digest = adapter.info.digest
        if self._lives.state(digest) in (AdapterState.READING, AdapterState.GONE):
            self._lives.enter(digest, AdapterState.IN_HOST)
        for victim in self._cpu.add(adapter, need, tenant):
            self._counts.cpu_evictions += 1
            self._left(victim)

    def forget_all(self) -> int:
        """Removes all adapters, which are in no slot. Returns their number."""
        forgotten = self._cpu.digests
        for digest in forgotten:
            self._cpu.remove(digest)
            self._left(digest)
        return len(forgotten)

    def _left(self, digest: str) -> None:
        self._send(ForgetShard(digest))
        if self._lives.state(digest) is AdapterState.IN_HOST:
            self._lives.enter(digest, AdapterState.GONE)


def _log_load(adapter: PackedAdapter) -> None:
    times = adapter.times
    log.info(
        "adapter %s loaded: %.0f MB, read %.0f ms, check %.0f ms, pack %.0f ms, digest waited for %.0f ms",
        adapter.info.digest[:12],
        adapter.block.numel() / 1e6,
        times.read_s * 1e3,
        times.check_s * 1e3,
        times.pack_s * 1e3,
        times.digest_s * 1e3,
    )
