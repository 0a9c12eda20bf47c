"""Brings KV blocks back from the host tier and the disk tier, for sequences that have just got blocks on the GPU.

Such a sequence holds its place and its blocks, and is in no step until its arrival has ended. Blocks come in the order
of the tokens: those on disk are read into the host tier, a window of them at a time, and whatever is in the host tier
is copied to the GPU. If a block is gone, damaged or late, the sequence computes its tokens from there on.

With recurrent layers, the snapshot of the state behind the last block comes too, and blocks are of use only with it. If
either does not come, the sequence must start again without the tiers.

The blocks that a copy writes to belong to the copy too. So they are not given to others before it has ended, even if
the sequence is aborted or preempted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lorafleet.workers.kv_tiers.disk_jobs import DiskJobs
from lorafleet.workers.kv_tiers.leaving_blocks import LeavingBlocks
from lorafleet.workers.kv_tiers.state_tiers import StateArrival, StateTiers
from lorafleet.workers.kv_tiers.stored_blocks import StoredBlock, StoredBlocks
from lorafleet.workers.kv_tiers.tier_counts import TierCounts
from lorafleet.workers.kv_tiers.tier_orders import TierOrders
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import Sequence

WINDOW = 256  # blocks of an arrival that are read, or wait in the host tier for their copy to the GPU
MAX_LOADING_BYTES = 512 << 20  # of all copies to one GPU in progress
PATIENCE_S = 2.0  # seconds after which an arrival ends with what has come


@dataclass(slots=True, eq=False)
class Arrival:
    """The blocks of one sequence that come back."""

    first: int  # Index of the first one in the sequence's block table.
    coming: list[StoredBlock]  # All that may still come; shortened if one cannot.
    tiers: list[str]  # The tier of each when the arrival began.
    deadline_s: float  # As time.monotonic().
    targets: list[int]  # Their blocks on the GPU.
    pinned: list[StoredBlock] = field(default_factory=list)  # The window: those from num_ordered on that are pinned.
    num_ordered: int = 0  # Blocks whose copy to the GPU has begun.
    num_arrived: int = 0  # Blocks that are on the GPU.
    is_abandoned: bool = False  # The sequence has ended or was preempted.
    is_cut: bool = False  # Some blocks cannot come.
    state: StateArrival | None = None  # The snapshot behind the last block, if the model has recurrent layers.


@dataclass(frozen=True, slots=True)
class _Load:
    """A copy to the GPU."""

    arrival: Arrival
    blocks: list[StoredBlock]
    targets: list[int]


class Arrivals:
    """The arrivals of one engine. `clock` is time.monotonic, except in tests. `states` is None without recurrent
    layers."""

    def __init__(
        self,
        kv: KVCacheManager,
        stored: StoredBlocks,
        orders: TierOrders,
        disk: DiskJobs,
        leaving: LeavingBlocks,
        counts: TierCounts,
        clock: Callable[[], float] = time.monotonic,
        states: StateTiers | None = None,
    ) -> None:
        self._kv = kv
        self._stored = stored
        self._orders = orders
        self._disk = disk
        self._leaving = leaving
        self._counts = counts
        self._clock = clock
        self._states = states
        self._max_loading = max(1, MAX_LOADING_BYTES // orders.slot_bytes)
        self._sequences: dict[Sequence, Arrival] = {}  # in the order of their start
        self._loads: dict[int, _Load] = {}

    def begin(
        self, sequence: Sequence, first: int, coming: list[StoredBlock], state: StateArrival | None = None
    ) -> None:
        """Begins to bring blocks to those of the sequence from index `first` on, and the snapshot behind them."""
        assert sequence.blocks is not None
        for block in coming:
            self._stored.touch(block)
        tiers = ["disk" if block.host is None else "host" for block in coming]
        targets = list(sequence.blocks.table[first : first + len(coming)])
        arrival = Arrival(first, coming, tiers, self._clock() + PATIENCE_S, targets, state=state)
        sequence.arrival = self._sequences[sequence] = arrival
        self._advance(arrival, is_late=False)

    def abandon(self, sequence: Sequence) -> None:
        """Ends the arrival of a sequence that gives its blocks back."""
        arrival = self._sequences.pop(sequence)
        arrival.is_abandoned = True
        sequence.arrival = None
        self._cut(arrival, arrival.num_ordered)
        if self._states is not None and arrival.state is not None:
            self._states.abandon(arrival.state)

    def poll(self) -> list[Sequence]:
        """Takes in the copies that have ended, starts others, and lets sequences go on whose blocks are there.

        Returns the sequences that must start again, since the state behind their blocks cannot be had.
        """
        for load_id in self._orders.take_loaded():
            load = self._loads.pop(load_id)
            load.arrival.num_arrived += len(load.blocks)
            self._kv.let_go(load.targets)
            for block in load.blocks:
                self._stored.unpin(block)
        now, failed = self._clock(), list[Sequence]()
        for sequence, arrival in list(self._sequences.items()):
            is_late = now >= arrival.deadline_s
            if is_late and arrival.num_ordered < len(arrival.coming):
                self._counts.lost_blocks["late"] += len(arrival.coming) - arrival.num_ordered
                self._cut(arrival, arrival.num_ordered)
            self._advance(arrival, is_late=is_late)
            state = arrival.state
            if state is not None and (state.has_failed or arrival.is_cut):
                failed.append(sequence)
            elif arrival.num_arrived == len(arrival.coming) and (state is None or state.has_arrived):
                self._end(sequence, arrival)
        return failed

    def _advance(self, arrival: Arrival, *, is_late: bool) -> None:
        if self._states is not None and arrival.state is not None:
            self._states.advance(arrival.state, is_late=is_late)
        self._pin_window(arrival)
        pairs: list[tuple[int, int]] = []
        room = self._max_loading - sum(len(load.blocks) for load in self._loads.values())
        for block in arrival.pinned[: max(0, room)]:
            if block.host is None:
                break
            pairs.append((block.host, arrival.targets[arrival.num_ordered + len(pairs)]))
        if not pairs:
            return
        blocks, arrival.pinned = arrival.pinned[: len(pairs)], arrival.pinned[len(pairs) :]
        targets = [target for _, target in pairs]
        self._leaving.save(targets)  # before they are overwritten
        self._kv.hold(targets)
        self._loads[self._orders.load(pairs)] = _Load(arrival, blocks, targets)
        self._counts.moved_blocks["host_to_gpu"] += len(pairs)
        arrival.num_ordered += len(pairs)

    def _pin_window(self, arrival: Arrival) -> None:
        """Pins the next blocks, and starts to read those that are on disk. Cuts the arrival at a block that is gone."""
        for index, block in enumerate(arrival.pinned, arrival.num_ordered):
            if block.host is None and not block.is_read:  # it was damaged
                self._cut(arrival, index)
                return
        num_seen = arrival.num_ordered + len(arrival.pinned)
        window = arrival.coming[num_seen : arrival.num_ordered + WINDOW]
        absent: list[StoredBlock] = []
        for index, block in enumerate(window, num_seen):
            if block.host is None and not block.is_read:
                if block.disk is None:
                    self._cut(arrival, index)
                    break
                absent.append(block)
            self._stored.pin(block)
            arrival.pinned.append(block)
        num_read = self._disk.read(absent) if absent else 0
        if num_read < len(absent):  # the others are pinned once they can be read
            index = arrival.pinned.index(absent[num_read])
            for block in arrival.pinned[index:]:
                self._stored.unpin(block)
            del arrival.pinned[index:]

    def _cut(self, arrival: Arrival, size: int) -> None:
        """Ends an arrival before its block of this index, whose copy has not begun."""
        arrival.is_cut = True
        del arrival.coming[size:]
        for block in arrival.pinned[size - arrival.num_ordered :]:
            self._stored.unpin(block)
        del arrival.pinned[size - arrival.num_ordered :]

    def _end(self, sequence: Sequence, arrival: Arrival) -> None:
        """Lets the sequence compute its other tokens, and publishes the blocks that have come."""
        assert sequence.blocks is not None
        del self._sequences[sequence]
        sequence.arrival = None
        size = self._kv.block_size
        sequence.num_computed = (arrival.first + arrival.num_arrived) * size
        if sequence.num_generated == 0:
            sequence.num_cached = sequence.num_computed
        self._kv.commit(sequence.blocks, sequence.tokens, sequence.num_computed)
        if self._states is not None and arrival.state is not None:
            self._states.resume(sequence, arrival.state)
        for tier in arrival.tiers[: arrival.num_arrived]:
            self._counts.hit_tokens[tier] += size
