"""The adapter directory, which knows what each public name stands for and which replica holds which adapter.

It is plain asyncio without Ray; cluster/directory/directory_actor.py wraps it into an actor. The catalogue below it is
durable. Names that resolvers found are held in memory only, and the replicas bring them back after a restart. Every
replica copies the names that it was asked for and polls with WatchCall. A write returns once every live replica has
acknowledged it, or can no longer use its old copies; see DirectoryTiming. The operations of administrators are in
cluster/admin/administration.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.directory.adapter_names import AdapterNames
from lorafleet.cluster.directory.copy_leases import CopyLeases
from lorafleet.cluster.directory.directory_calls import Answer, DirectoryCall
from lorafleet.cluster.directory.directory_epoch import DirectoryEpoch
from lorafleet.cluster.directory.directory_messages import Progress
from lorafleet.cluster.directory.directory_metrics import DirectoryCounts
from lorafleet.cluster.directory.directory_timing import TIMING, DirectoryTiming
from lorafleet.cluster.directory.neighbors import Neighbors
from lorafleet.cluster.directory.placement_rounds import PlacementRounds
from lorafleet.cluster.directory.placer import Pins
from lorafleet.cluster.directory.replica_table import ReplicaTable
from lorafleet.cluster.directory.residency import Residency
from lorafleet.cluster.directory.route_broadcast import RouteBroadcast
from lorafleet.cluster.tenancy.quota_book import QuotaBook


class AdapterDirectory:
    """Composes the parts of the directory. They run on one event loop, so nothing else happens between two awaits.

    It must be callable before load() has ended, since loading the catalogue of a million adapters takes longer than a
    lease. Until then it behaves as follows:
    - It accepts reports, and gives routers the location of adapters.
    - Replicas may use their copies, since nothing can be written.
    - Lookups of names wait.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        clock: Callable[[], float] = time.monotonic,
        fill_cpu_loras: bool = False,
        places_by_demand: bool = True,
        timing: DirectoryTiming = TIMING,
    ) -> None:
        self.catalogue = catalogue
        self.timing = timing
        self.on_replicas: Callable[[], None] = lambda: None  # Called when a replica has joined or left.
        self.pins: Pins = dict
        self.progress: list[Progress] = []
        self.epoch = DirectoryEpoch()
        self.names = AdapterNames(catalogue, self.epoch, self._names_changed)
        self.replicas = ReplicaTable(timing, clock, lambda: self.on_replicas(), self._replica_left)
        self.leases = CopyLeases(catalogue, self.epoch, self.names, self.replicas, timing, clock)
        self.residency = Residency(self.epoch.id, self.names, self.names.num_bytes)
        self.neighbors = Neighbors(self.residency)
        self.routers = RouteBroadcast(self.residency, self.replicas, timing, clock)
        self.placement = PlacementRounds(
            self.epoch,
            self.names,
            self.replicas,
            self.routers,
            lambda: self.pins(),
            timing,
            clock,
            fill_cpu_loras,
            places_by_demand,
        )
        self.quotas = QuotaBook(self.replicas.live, clock)

    async def load(self) -> None:
        """Loads the catalogue and begins a new epoch; see DirectoryEpoch.load."""
        await self.epoch.load(self.catalogue)
        if self.catalogue.state.adapters:
            # Replicas may still use copies from before, even replicas that have not joined this process.
            self.leases.expect_earlier_leases()
        self.residency.begin(self.epoch.id)
        self.replicas.forget_acknowledgements()
        self.routers.publish()
        self.on_replicas()

    async def ask(self, call: DirectoryCall[Answer]) -> Answer:
        """Answers a call of a replica or router that runs in this process."""
        return await call.answered_by(self)

    @property
    def idle(self) -> bool:
        """Whether no replica has called for a while, so that nobody is left who could use this directory."""
        return not self.replicas.live()

    def tick(self) -> None:
        """Treats a silent replica as gone, and ends drains that are overdue. Called every second."""
        self.placement.end_overdue_drains()
        self.replicas.notice_silent()
        for replica_id in self.residency.loads.keys() - set(self.replicas.live()):
            self.residency.forget(replica_id)
        self.routers.publish()

    def counts(self) -> DirectoryCounts:
        placed = self.placement.counts
        return DirectoryCounts(
            adapters=len(self.catalogue.state.adapters),
            replicas=len(self.replicas.live()),
            placed_adapters=placed.placed,
            homes=placed.homes,
            placement_rounds=placed.rounds,
            placement_round_seconds=placed.round_seconds,
            rebalances=placed.rebalances,
            placements=placed.placements,
            moves=placed.moves,
            moved_bytes=placed.moved_bytes,
            reads_ahead=self.placement.num_read_ahead,
            reports=self.residency.num_reports,
        )

    def _names_changed(self, names: Collection[str]) -> None:
        for name in names:
            self.residency.name_changed(name)
        self.replicas.wake_all()
        self.routers.publish()

    def _replica_left(self, replica_id: str) -> None:
        self.neighbors.register(replica_id, None)
        self.residency.forget(replica_id)
        self.placement.end_drain(replica_id)
        self.routers.publish()
