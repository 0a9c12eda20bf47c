"""Moves KV blocks between the host tier and the disk tier, in a bounded number of jobs at a time.

Blocks are written before the host tier needs their slots. The first write that fails turns writing off, since the disk
is most likely full or broken. Blocks that are on disk already are still read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from lorafleet.workers.kv_tiers.stored_blocks import StoredBlock, StoredBlocks
from lorafleet.workers.kv_tiers.tier_counts import TierCounts
from lorafleet.workers.kv_tiers.tier_orders import EndedJob, TierOrders

log = logging.getLogger(__name__)

JOB_BLOCKS = 4  # one thread moves so many in one job
MAX_WRITING = 32  # blocks in jobs that write
MAX_READING = 64  # blocks in jobs that read


@dataclass(frozen=True, slots=True)
class _Job:
    blocks: Sequence[StoredBlock]
    slots: Sequence[int]  # The reserved slot of each, on disk or in the host tier.
    writes: bool


class DiskJobs:
    """The jobs of one replica. `writes` says whether there is a disk tier."""

    def __init__(self, stored: StoredBlocks, orders: TierOrders, counts: TierCounts, *, writes: bool) -> None:
        self.writes = writes
        self._stored = stored
        self._orders = orders
        self._counts = counts
        self._jobs: dict[int, _Job] = {}

    @property
    def num_jobs(self) -> int:
        """Number of jobs in progress."""
        return len(self._jobs)

    def write_behind(self) -> None:
        """Starts to write the blocks that will leave the host tier next."""
        num_writing = self._num_in_jobs(writes=True)
        while self.writes and num_writing < MAX_WRITING:
            blocks = self._stored.take_unwritten(JOB_BLOCKS)
            slots = [slot for _ in blocks if (slot := self._stored.reserve_disk()) is not None]
            blocks = blocks[: len(slots)]
            if not blocks:
                break
            assert all(block.host is not None for block in blocks)
            pairs = [(block.host or 0, slot) for block, slot in zip(blocks, slots, strict=True)]
            self._start(self._orders.write(pairs), _Job(blocks, slots, writes=True))
            num_writing += len(blocks)

    def read(self, blocks: Sequence[StoredBlock]) -> int:
        """Starts to read blocks that are on disk alone, the first ones first. Returns their number, which is smaller
        than asked for if too many are read already, or the host tier has no slots left."""
        slots: list[int] = []
        for _ in blocks[: MAX_READING - self._num_in_jobs(writes=False)]:
            slot = self._stored.reserve_host()
            if slot is None:
                break
            slots.append(slot)
        for start in range(0, len(slots), JOB_BLOCKS):
            job = _Job(
                blocks[start : min(start + JOB_BLOCKS, len(slots))], slots[start : start + JOB_BLOCKS], writes=False
            )
            pairs = [(block.disk or 0, slot) for block, slot in zip(job.blocks, job.slots, strict=True)]
            self._start(self._orders.read(pairs), job)
        return len(slots)

    def poll(self) -> None:
        """Records the jobs that have ended."""
        for ended in self._orders.take_ended():
            job = self._jobs.pop(ended.job_id)
            for index, (block, slot) in enumerate(zip(job.blocks, job.slots, strict=True)):
                if job.writes:
                    self._written(block, slot, succeeded=index not in ended.failed)
                else:
                    self._read(block, slot, succeeded=index not in ended.failed)
                self._stored.unpin(block)
            self._report(job, ended)

    def _start(self, job_id: int, job: _Job) -> None:
        self._jobs[job_id] = job
        for block in job.blocks:
            block.is_read = not job.writes
            self._stored.pin(block)

    def _written(self, block: StoredBlock, slot: int, *, succeeded: bool) -> None:
        if succeeded:
            self._counts.moved_blocks["host_to_disk"] += 1
            self._stored.enter_disk(block, slot)
        else:
            self._counts.lost_blocks["unwritten"] += 1
            self._stored.give_back(disk=slot)

    def _read(self, block: StoredBlock, slot: int, *, succeeded: bool) -> None:
        block.is_read = False
        if succeeded:
            self._counts.moved_blocks["disk_to_host"] += 1
            self._stored.enter_host(block, slot)
        else:
            self._counts.lost_blocks["damaged"] += 1
            self._stored.give_back(host=slot)
            self._stored.leave_disk(block)

    def _report(self, job: _Job, ended: EndedJob) -> None:
        if not ended.failed:
            return
        if not job.writes:
            log.warning("KV blocks or states on disk are damaged and will be computed again: %s", ended.fault)
        elif self.writes:
            self.writes = False
            log.error(
                "the disk tier of the KV cache takes no more blocks until a restart, since a write failed: %s. "
                "Requests go on.",
                ended.fault,
            )

    def _num_in_jobs(self, *, writes: bool) -> int:
        return sum(len(job.blocks) for job in self._jobs.values() if job.writes is writes)
