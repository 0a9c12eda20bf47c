"""Moves the KV blocks of one rank, or its snapshots of states, between its GPU and its parts of the two lower tiers.

It decides nothing. Rank 0 gives the same orders to all ranks, in the same order (tier_orders.py): what goes to which
slot, and when a slot is free again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from lorafleet.workers.kv_tiers.block_movers import BlockMover, Pairs
from lorafleet.workers.kv_tiers.disk_blocks import DamagedBlockError, DiskBlocks
from lorafleet.workers.kv_tiers.host_blocks import HostBlocks
from lorafleet.workers.tp.rank_messages import BlocksMoved, TierContent

log = logging.getLogger(__name__)

READ_THREADS = 8
WRITE_THREADS = 2

Answer = Callable[[BlocksMoved], None]


class RankTiers:
    """The tiers of one rank. Everything but the threads' jobs belongs to the thread of its loop.

    Args:
        disk: None if there is no disk tier.
        content: Whether it moves KV blocks or snapshots of states. Comments and names speak of blocks for both.
    """

    def __init__(
        self,
        rank: int,
        mover: BlockMover,
        host: HostBlocks,
        disk: DiskBlocks | None,
        content: TierContent = "blocks",
    ) -> None:
        self.content: TierContent = content
        self.host = host
        self.disk = disk
        self._rank = rank
        self._mover = mover
        self._loads: deque[tuple[int, torch.cuda.Event | None]] = deque()  # numbers and ends, in their order
        # Reads have threads of their own, since requests wait for them.
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="kv-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, thread_name_prefix="kv-write")

    @property
    def num_slots(self) -> tuple[int, int]:
        """Number of slots of the host tier and of the disk tier."""
        return self.host.num_slots, 0 if self.disk is None else self.disk.num_slots

    def save(self, pairs: Pairs) -> None:
        """Queues copies from KV blocks to host slots, (block, slot) each."""
        self._mover.save(pairs)

    def load(self, load_id: int, pairs: Pairs) -> None:
        """Queues copies from host slots to KV blocks, (slot, block) each."""
        self._loads.append((load_id, self._mover.load(pairs)))

    def take_loaded(self) -> list[int]:
        """Returns the loads that have ended since the last call. They end in the order of their start."""
        ended: list[int] = []
        while self._loads and (self._loads[0][1] is None or self._loads[0][1].query()):
            ended.append(self._loads.popleft()[0])
        return ended

    def await_load(self, load_id: int) -> None:
        """Makes the steps that are launched from now on wait for a load, which has ended on rank 0."""
        first, event = self._loads.popleft()
        assert first == load_id, (first, load_id)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def write(self, job_id: int, pairs: Pairs, answer: Answer) -> None:
        """Writes host slots to disk, (host slot, disk slot) each, in a thread that calls `answer` at the end.

        It stops at the first error, since the next write would most likely fail as well.
        """
        events = [self._mover.last_copy(slot) for slot, _ in pairs]
        self._writers.submit(self._guarded, self._write, job_id, pairs, events, answer)

    def read(self, job_id: int, pairs: Pairs, answer: Answer) -> None:
        """Reads disk slots into host slots, (disk slot, host slot) each, in a thread that calls `answer` at the end."""
        events = [self._mover.last_copy(slot) for _, slot in pairs]
        self._readers.submit(self._guarded, self._read, job_id, pairs, events, answer)

    def find_addresses(self) -> None:
        """Must be called after the KV cache has got other memory."""
        self._mover.find_addresses()

    def close(self) -> None:
        """Waits for the copies and jobs in progress, and frees all memory and files."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._mover.wait()
        self.host.close()
        if self.disk is not None:
            self.disk.close()

    def _guarded(
        self,
        work: Callable[[Pairs, list[torch.cuda.Event | None]], tuple[list[int], str]],
        job_id: int,
        pairs: Pairs,
        events: list[torch.cuda.Event | None],
        answer: Answer,
    ) -> None:
        """Runs a job and answers in any case, since rank 0 holds its slots until then."""
        try:
            failed, fault = work(pairs, events)
        except Exception as error:
            log.exception("rank %d: a job of the KV tiers has failed", self._rank)
            failed, fault = list(range(len(pairs))), repr(error)
        answer(BlocksMoved(self._rank, job_id, failed, fault, self.content))

    def _write(self, pairs: Pairs, events: list[torch.cuda.Event | None]) -> tuple[list[int], str]:
        """Returns the indices of the pairs that were not written, and why."""
        assert self.disk is not None
        for index, ((slot, to), event) in enumerate(zip(pairs, events, strict=True)):
            if event is not None:
                event.synchronize()
            try:
                self.disk.write(to, self.host.view(slot))
            except OSError as error:
                return list(range(index, len(pairs))), error.strerror or repr(error)
        return [], ""

    def _read(self, pairs: Pairs, events: list[torch.cuda.Event | None]) -> tuple[list[int], str]:
        """Returns the indices of the pairs that were not read, and why."""
        assert self.disk is not None
        failed, fault = list[int](), ""
        for index, ((at, slot), event) in enumerate(zip(pairs, events, strict=True)):
            if event is not None:
                event.synchronize()
            try:
                self.disk.read(at, self.host.view(slot))
            except (DamagedBlockError, OSError) as error:
                failed.append(index)
                fault = str(error)
        return failed, fault
