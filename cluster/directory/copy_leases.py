"""Keeps the replicas' copies of names correct: which changes each replica has acknowledged, and until when a silent one
may still use its copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.directory.adapter_names import AdapterNames
from lorafleet.cluster.directory.directory_epoch import DirectoryEpoch
from lorafleet.cluster.directory.directory_messages import Changes
from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.replica_table import ReplicaTable
from lorafleet.protocol.lora_request import LoRARequest


class CopyLeases:
    """The copies that replicas have of the directory's names; see DirectoryTiming for their leases."""

    def __init__(
        self,
        catalogue: Catalogue,
        epoch: DirectoryEpoch,
        names: AdapterNames,
        replicas: ReplicaTable,
        timing: DirectoryTiming,
        clock: Callable[[], float],
    ) -> None:
        self._catalogue = catalogue
        self._epoch = epoch
        self._names = names
        self._replicas = replicas
        self._timing = timing
        self._clock = clock
        self._earlier_until_s = clock()  # End of the leases that an earlier process has given.

    def join(self, replica_id: str, epoch: str, names: list[str], found: list[LoRARequest], ready: bool) -> Changes:
        """Registers a replica, and returns the present targets of its names.

        The replica has just started (epoch ""), or has found a restarted directory. In that case it brings what
        resolvers found for it, and the first replica to bring a name wins. `ready` says that it may be ordered to load
        adapters.
        """
        if epoch not in ("", self._epoch.id):
            self.expect_earlier_leases()
        if not self._epoch.is_loaded:
            self._replicas.record_call(replica_id).is_ready = ready
            return Changes(self._epoch.id, self._names.version, {})
        replica = self._replicas.join(replica_id, ready)
        for lora in found:
            self._names.add_found(lora)
        served = {name: self._names.served(name) for name in names}
        position = self._catalogue.position
        return Changes(self._epoch.id, self._names.version, served, replica.orders_after(0), position)

    async def watch(self, replica_id: str, epoch: str, version: int, order: int) -> Changes:
        """Acknowledges `version`, and returns as soon as there is a newer version or an order after `order`, or after
        hold_s."""
        self._epoch.check(epoch)
        replica = self._replicas.record_call(replica_id)
        replica.acknowledged = max(replica.acknowledged, version)
        self._replicas.moved.wake()
        deadline_s = self._clock() + self._timing.hold_s
        while version >= self._names.version and order >= replica.last_order:
            if not await replica.news.wait(deadline_s):
                break
        self._epoch.check(epoch)
        self._replicas.record_call(replica_id)
        changed, position = self._names.changed_since(version), self._catalogue.position
        return Changes(self._epoch.id, self._names.version, changed, replica.orders_after(order), position)

    def expect_earlier_leases(self) -> None:
        """Makes writes wait until the leases of an earlier process have expired."""
        self._earlier_until_s = self._clock() + self._timing.acknowledge_s

    async def acknowledged(self) -> None:
        """Waits until every live replica knows all changes so far, or its lease has expired because it did not poll."""
        version = self._names.version
        await asyncio.sleep(max(0.0, self._earlier_until_s - self._clock()))
        deadline_s = self._clock() + self._timing.acknowledge_s
        while not self._replicas.have_acknowledged(version):
            if not await self._replicas.moved.wait(deadline_s):
                return
