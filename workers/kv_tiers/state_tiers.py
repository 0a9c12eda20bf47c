"""Holds the snapshots of recurrent states that leave the GPU in the tiers, and brings them back to its snapshot slots.

A snapshot has the name of the KV block behind which it was taken (block_names.py). It is of use only together with all
blocks up to there, so arrivals.py brings both. Once it is back, it is a snapshot of the prefix cache like any other.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from lorafleet.workers.kv_tiers.block_movers import staging_rows
from lorafleet.workers.kv_tiers.disk_jobs import DiskJobs
from lorafleet.workers.kv_tiers.leaving_blocks import LeavingBlocks
from lorafleet.workers.kv_tiers.stored_blocks import StoredBlock, StoredBlocks
from lorafleet.workers.kv_tiers.tier_counts import TierCounts
from lorafleet.workers.kv_tiers.tier_orders import TierOrders
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.schedule.state_snapshots import StateSnapshots


@dataclass(slots=True, eq=False)
class StateArrival:
    """A snapshot that comes back for one sequence."""

    stored: StoredBlock  # Pinned until the copy has ended.
    slot: int  # Snapshot slot on the GPU, reserved for it.
    was_read: bool = False  # Its reading from disk has begun.
    is_loading: bool = False  # Its copy to the GPU is in progress.
    has_arrived: bool = False
    has_failed: bool = False  # It is damaged or late.
    is_abandoned: bool = False  # The sequence has ended or was preempted.


class StateTiers:
    """The snapshots of one engine below the GPU.

    Args:
        pool: The snapshots on the GPU.
        num_host: Number of slots of the host tier.
        num_disk: Number of slots of the disk tier; 0 without one.
    """

    def __init__(self, pool: StateSnapshots, orders: TierOrders, num_host: int, num_disk: int) -> None:
        self.pool = pool
        self.orders = orders
        self.counts = TierCounts()
        self.stored = StoredBlocks(num_host, num_disk)
        self.disk = DiskJobs(self.stored, orders, self.counts, writes=num_disk > 0)
        self.leaving = LeavingBlocks(self.stored, orders, self.counts, staging_rows(orders.slot_bytes))
        self._loads: dict[int, StateArrival] = {}

    @property
    def is_loading(self) -> bool:
        """Whether copies to the GPU are in progress."""
        return bool(self._loads)

    def before_step(self, chunks: Many[Chunk]) -> None:
        """Saves the snapshots that the step of these chunks overwrites."""
        self.leaving.before_step([chunk.snapshot for chunk in chunks if chunk.snapshot is not None])

    def reserve(self, stored: StoredBlock) -> StateArrival | None:
        """Reserves a slot on the GPU for a stored snapshot. Returns None if all of them are in use."""
        self.stored.pin(stored)
        slot = self.pool.reserve()
        if slot is None:
            self.stored.unpin(stored)
            return None
        self.stored.touch(stored)
        return StateArrival(stored, slot)

    def advance(self, arrival: StateArrival, *, is_late: bool) -> None:
        """Starts the next copy of a snapshot, if there is one to start."""
        if arrival.is_loading or arrival.has_arrived or arrival.has_failed:
            return
        stored = arrival.stored
        if stored.host is not None:
            self.leaving.save([arrival.slot])  # before it is overwritten
            self._loads[self.orders.load([(stored.host, arrival.slot)])] = arrival
            self.counts.moved_blocks["host_to_gpu"] += 1
            arrival.is_loading = True
        elif is_late:
            self.counts.lost_blocks["late"] += 1
            arrival.has_failed = True
        elif not stored.is_read:
            if arrival.was_read or stored.disk is None:  # it was damaged
                arrival.has_failed = True
            else:
                arrival.was_read = self.disk.read([stored]) == 1  # or later, if too many are read

    def resume(self, sequence: Sequence, arrival: StateArrival) -> None:
        """Publishes a snapshot that has arrived behind the sequence's known blocks, and lets the sequence resume from
        it."""
        assert arrival.has_arrived and sequence.blocks is not None and sequence.snapshots is not None
        node = sequence.blocks.nodes[-1]
        self.pool.publish(arrival.slot, node)
        sequence.snapshots.resumes_from = node, self.pool.pin(node)

    def abandon(self, arrival: StateArrival) -> None:
        """Ends an arrival whose sequence gives its memory back. A copy in progress keeps its slot until it ends."""
        arrival.is_abandoned = True
        if not arrival.is_loading:
            self.pool.give_back(arrival.slot)
            if not arrival.has_arrived:
                self.stored.unpin(arrival.stored)

    def poll(self) -> None:
        """Takes in the copies and jobs that have ended, and starts to write others."""
        self.disk.poll()
        for load_id in self.orders.take_loaded():
            arrival = self._loads.pop(load_id)
            arrival.is_loading, arrival.has_arrived = False, True
            self.stored.unpin(arrival.stored)
            if arrival.is_abandoned:
                self.pool.give_back(arrival.slot)
        self.disk.write_behind()

    def clear(self) -> None:
        """Forgets all snapshots in the tiers."""
        self.leaving.clear()
        self.stored.clear()
