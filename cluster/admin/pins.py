"""Keeps pinned adapters in slots: orders pins from the replicas that should have them, and follows every change."""

from __future__ import annotations

import asyncio
import logging

from lorafleet.cluster.admin.replica_orders import ReplicaOrders, ring_of
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.routing.rendezvous import key_of
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest

logger = logging.getLogger("lorafleet.cluster")


class AdapterPins:
    def __init__(self, directory: AdapterDirectory, replicas: ReplicaOrders) -> None:
        self._directory = directory
        self._replicas = replicas
        self._ordered: dict[tuple[str, str], LoRARequest] = {}  # Ordered pins, by replica and digest.

    def follow(self) -> None:
        """Orders only the pins that changed. Called after a change, and when a replica joins or leaves."""
        wanted, live = self._wanted(), set(self._directory.replicas.ready())
        for (replica, digest), lora in self._ordered.items():
            if (replica, digest) not in wanted and replica in live:
                self._directory.replicas.order(replica, "unpin", lora)
        for (replica, digest), lora in wanted.items():
            if (replica, digest) not in self._ordered:
                self._directory.replicas.order(replica, "pin", lora).add_done_callback(_log_failure)
        self._ordered = wanted

    async def confirm(self, adapter: AdapterRecord) -> None:
        """Repeats the pin orders of one adapter, to wait for their outcome. Raises the first error."""
        for number in sorted(adapter.served()):
            lora = self._directory.catalogue.state.request(adapter.name, adapter.version(number))
            homes = [replica for replica, digest in self._ordered if digest == lora.digest]
            await self._replicas.order_all("pin", lora, homes)

    def replicas_by_digest(self) -> dict[str, tuple[str, ...]]:
        pinned: dict[str, tuple[str, ...]] = {}
        for replica, digest in self._ordered:
            pinned[digest] = (*pinned.get(digest, ()), replica)
        return pinned

    def _wanted(self) -> dict[tuple[str, str], LoRARequest]:
        state, ring = self._directory.catalogue.state, ring_of(self._directory.replicas.ready())
        wanted: dict[tuple[str, str], LoRARequest] = {}
        for name in state.pinned:
            adapter = state.adapters[name]
            for number in adapter.served():
                lora = state.request(name, adapter.version(number))
                homes = ring.first(key_of(name), adapter.pinned_replicas)
                wanted |= {(replica, lora.digest): lora for replica in homes}
        return wanted


def _log_failure(done: asyncio.Future[AdapterInfo | None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        logger.error("an adapter could not be pinned: %s", error)
