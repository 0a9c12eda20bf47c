"""Runs the rounds of placement, and carries them out: replicas read adapters ahead, and one that is being stopped hands
its adapters over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lorafleet.cluster.directory.adapter_names import AdapterNames
from lorafleet.cluster.directory.directory_epoch import DirectoryEpoch
from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.filling import Filler
from lorafleet.cluster.directory.placer import Pins, Placer, PlacerCounts
from lorafleet.cluster.directory.prefetching import Prefetcher
from lorafleet.cluster.directory.replica_table import ReplicaTable
from lorafleet.cluster.directory.route_broadcast import RouteBroadcast
from lorafleet.cluster.directory.slices import in_slices
from lorafleet.protocol.lora_request import AdapterInfo

logger = logging.getLogger("lorafleet.cluster")


class PlacementRounds:
    """Places adapters on the replicas that stay. `routers` publishes the outcome of each round.

    Args:
        pins: returns the replicas that hold each pinned adapter in a slot.
    """

    def __init__(
        self,
        epoch: DirectoryEpoch,
        names: AdapterNames,
        replicas: ReplicaTable,
        routers: RouteBroadcast,
        pins: Pins,
        timing: DirectoryTiming,
        clock: Callable[[], float],
        fill_cpu_loras: bool,
        places_by_demand: bool,
    ) -> None:
        self._epoch = epoch
        self._names = names
        self._replicas = replicas
        self._routers = routers
        self._timing = timing
        self._clock = clock
        residency = routers.residency
        self._filler = Filler(residency, names.all_digests, self._read_ahead) if fill_cpu_loras else None
        self._prefetcher = Prefetcher(residency, self._read_ahead) if places_by_demand else None
        self._placer = Placer(
            residency,
            names.size,
            pins,
            self._read_ahead,
            self._filler,
            prefetcher=self._prefetcher,
            places_by_demand=places_by_demand,
        )
        self._placing = asyncio.Lock()
        self._hand_overs: dict[str, asyncio.Task[None]] = {}  # By the replica that is being stopped.

    @property
    def counts(self) -> PlacerCounts:
        return self._placer.counts

    @property
    def num_read_ahead(self) -> int:
        """Number of adapters that replicas were ordered to read before they are requested."""
        others = [part.num_ordered for part in (self._filler, self._prefetcher) if part is not None]
        return self.counts.reads_ahead + sum(others)

    async def place(self) -> None:
        """Runs one round of placement. Called about every ROUND_S."""
        if not self._epoch.is_loaded:
            return
        async with self._placing:
            began_s = self._clock()
            await in_slices(self._placer.round(began_s))
            self.counts.rounds += 1
            self.counts.round_seconds += self._clock() - began_s
        self._routers.publish()

    async def drain(self, replica_id: str) -> None:
        """Hands over the adapters of a replica to which Serve sends no more requests. A router calls this at once, and
        the replica itself when it has answered its requests. Returns when other replicas hold the requested adapters
        that only it held, or hand_over_s after the first call."""
        if replica_id not in self._replicas:
            return
        if replica_id not in self._hand_overs:
            self._placer.leaves(replica_id)
            self._hand_overs[replica_id] = asyncio.get_running_loop().create_task(self._hand_over(replica_id))
            self._replicas.start_draining(replica_id)
        await asyncio.wait([self._hand_overs[replica_id]])

    def end_drain(self, replica_id: str) -> None:
        """Ends the effect of drain(), since the replica is gone, or was not stopped after all."""
        self._hand_overs.pop(replica_id, None)
        self._replicas.end_draining(replica_id)
        self._placer.stays(replica_id)

    def end_overdue_drains(self) -> None:
        """Ends drains after forget_s, since a replica that still lives then was not stopped after all."""
        for replica_id in self._replicas.overdue_drains():
            self.end_drain(replica_id)

    async def _hand_over(self, replica_id: str) -> None:
        await self.place()
        orders = [self._read_ahead(home, digest) for home, digest in self._placer.orphans(replica_id)]
        sent = [order for order in orders if order is not None]
        done, late = await asyncio.wait(sent, timeout=self._timing.hand_over_s) if sent else (set(), set())
        failed = sum(1 for order in done if order.exception() is not None)
        logger.info(
            "replica %s is stopping: of %d adapters handed over, %d failed and %d are late",
            replica_id,
            len(sent),
            failed,
            len(late),
        )

    def _read_ahead(self, replica_id: str, digest: str) -> asyncio.Future[AdapterInfo | None] | None:
        """Orders the replica to load the adapter. Returns None if the replica is not ready or no name stands for the
        adapter."""
        lora = self._names.lora_of(digest) if replica_id in self._replicas.ready() else None
        return None if lora is None else self._replicas.order(replica_id, "load", lora)
