"""Orders the moves of KV blocks, or of snapshots of states, on all ranks of a replica. It belongs to rank 0.

Each rank has its part of every block in the slots of the same numbers. Orders reach the ranks in one order with the
steps (workers/tp/link.py). A job of the disk has ended once it has on all ranks, and a block is of use only if it
succeeded on all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from lorafleet.workers.kv_tiers.block_movers import Pairs
from lorafleet.workers.kv_tiers.rank_tiers import RankTiers
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import (
    AwaitBlocks,
    BlocksMoved,
    LoadBlocks,
    Order,
    ReadBlocks,
    SaveBlocks,
    WriteBlocks,
)


@dataclass(slots=True)
class EndedJob:
    """A job of the disk on all ranks."""

    job_id: int
    num_waiting: int  # Number of ranks that have not answered.
    failed: set[int] = field(default_factory=set)  # Indices of its pairs that failed on some rank.
    fault: str = ""  # The reason of the last failure.


class TierOrders:
    """The orders of one replica about one content.

    Args:
        own: Rank 0's tiers for it.
        others: None for a rank alone.
        wake: Called from other threads when a job has ended.
    """

    def __init__(
        self, own: RankTiers, others: OtherRanks | None = None, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._own = own
        self._content = own.content
        self._others = others
        self._wake = wake
        self._ids = count()
        self._answers: deque[BlocksMoved] = deque()  # rank 0's own, from its threads
        self._jobs: dict[int, EndedJob] = {}

    @property
    def num_ranks(self) -> int:
        return 1 if self._others is None else 1 + len(self._others.ranks)

    @property
    def slot_bytes(self) -> int:
        return self._own.host.slot_bytes

    def save(self, pairs: Pairs) -> None:
        """Orders copies of KV blocks to host slots, (block, slot) each, before the next step."""
        self._own.save(pairs)
        self._send(SaveBlocks(self._content, list(pairs)))

    def load(self, pairs: Pairs) -> int:
        """Orders copies of host slots to KV blocks, (slot, block) each. Returns the number of the load."""
        load_id = next(self._ids)
        self._own.load(load_id, pairs)
        self._send(LoadBlocks(self._content, load_id, list(pairs)))
        return load_id

    def take_loaded(self) -> list[int]:
        """Returns the loads that have ended. Other ranks' next steps wait for theirs."""
        ended = self._own.take_loaded()
        for load_id in ended:
            self._send(AwaitBlocks(self._content, load_id))
        return ended

    def write(self, pairs: Pairs) -> int:
        """Orders to write host slots to disk, (host slot, disk slot) each. Returns the number of the job."""
        job_id = self._job()
        self._own.write(job_id, pairs, self._answer)
        self._send(WriteBlocks(self._content, job_id, list(pairs)))
        return job_id

    def read(self, pairs: Pairs) -> int:
        """Orders to read disk slots into host slots, (disk slot, host slot) each. Returns the number of the job."""
        job_id = self._job()
        self._own.read(job_id, pairs, self._answer)
        self._send(ReadBlocks(self._content, job_id, list(pairs)))
        return job_id

    def take_ended(self) -> list[EndedJob]:
        """Returns the jobs that have ended on all ranks."""
        answers = [self._answers.popleft() for _ in range(len(self._answers))]
        if self._others is not None:
            answers += self._others.moved(self._content)
        for answer in answers:
            job = self._jobs[answer.job_id]
            job.num_waiting -= 1
            job.failed.update(answer.failed)
            job.fault = answer.fault or job.fault
        return [self._jobs.pop(job.job_id) for job in list(self._jobs.values()) if not job.num_waiting]

    def close(self) -> None:
        self._own.close()

    def _job(self) -> int:
        job_id = next(self._ids)
        self._jobs[job_id] = EndedJob(job_id, self.num_ranks)
        return job_id

    def _answer(self, answer: BlocksMoved) -> None:
        self._answers.append(answer)
        self._wake()

    def _send(self, order: Order) -> None:
        if self._others is not None:
            self._others.send(order)
