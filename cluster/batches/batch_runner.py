"""Runs the batches of the store on the one replica that holds the lease, a few at a time.

The lease is in the directory's process. It only avoids wasted work: if two replicas ever run one batch, its log
(batch_log.py) lets only one of them go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from lorafleet.api.access.work_threads import UPKEEP, in_turn
from lorafleet.cluster.batches import batch_bounds as bounds
from lorafleet.cluster.batches.batch_care import BatchCare
from lorafleet.cluster.batches.batch_records import BatchRecord, Ending, FindCaller
from lorafleet.cluster.batches.batch_store import BatchName, BatchStore
from lorafleet.cluster.batches.batch_work import BATCH_TIMING, BatchTiming, BatchWork
from lorafleet.cluster.batches.line_places import LinePlaces
from lorafleet.cluster.batches.line_post import LineTransport, PostLine
from lorafleet.cluster.batches.log_journal import TurnLost
from lorafleet.offline.batch.line_sender import LineSender, SenderOptions

LINE_S = 3600.0  # Time that a replica may take for one answer.

logger = logging.getLogger("lorafleet.cluster")


class BatchRunner:
    """Runs batches on this replica while it holds the lease.

    Args:
        take_turn: Takes or renews the lease for BATCH_TURN_S, and returns whether this replica holds it.
        find_caller: Finds who sends a batch's lines, or None if its key is no longer valid or not the owner's.
        post: Has one line answered by any replica.
        most_lines: Lines of all batches in flight.
    """

    def __init__(
        self,
        store: BatchStore,
        take_turn: Callable[[], Awaitable[bool]],
        find_caller: FindCaller,
        post: PostLine,
        most_lines: int,
        timing: BatchTiming = BATCH_TIMING,
    ) -> None:
        self.num_open = 0  # As of the last look.
        self.endings: Counter[Ending] = Counter({"completed": 0, "failed": 0, "expired": 0, "cancelled": 0})
        self.store = store
        self._take_turn = take_turn
        self._find_caller = find_caller
        self._post = post
        self._timing = timing
        self.places = LinePlaces(most_lines)
        self._running: dict[BatchName, BatchWork] = {}
        self._threads = ThreadPoolExecutor(bounds.MAX_RUNNING, thread_name_prefix="batch")
        self._finishing = threading.Lock()
        self._renewed_s = float("-inf")
        self._care = BatchCare(store, self._finishing)
        self._failed_s: dict[BatchName, float] = {}  # When a run ended with an error; as time.monotonic().

    @property
    def num_running(self) -> int:
        """Batches that this replica is running."""
        return len(self._running)

    async def keep_running(self) -> None:
        try:
            while True:
                try:
                    await self.look()
                except Exception as error:  # The directory or the store may be unavailable for a while.
                    logger.warning("batches could not be looked for: %r", error)
                await asyncio.sleep(self._timing.look_s)
        finally:
            self._stop()
            self._threads.shutdown(wait=False)
            self._care.cancel()

    async def look(self) -> None:
        """Renews the lease, and then starts batches that do not run, or stops those that do if the lease is lost."""
        if not await self._has_turn():
            self.num_open = 0
            self._stop()
            return
        running = set(self._running)
        open_names = await in_turn(UPKEEP, self.store.open_names)
        self.num_open = len(open_names)
        self._failed_s = {name: self._failed_s[name] for name in open_names if name in self._failed_s}
        # One that has ended since the list was read is still in it.
        waiting = [name for name in open_names if name not in running]
        while (name := self._next(waiting)) is not None:
            waiting.remove(name)
            record = await in_turn(UPKEEP, self.store.find, name.owner, name.batch_id)
            if record is not None:
                self._start(name, record)
        self._care.start_if_due()

    async def _has_turn(self) -> bool:
        """Returns whether this replica holds the lease, which also lasts while the directory is away for a moment."""
        began_s = time.monotonic()
        try:
            self._renewed_s = began_s if await self._take_turn() else float("-inf")
        except Exception:
            if began_s - self._renewed_s >= bounds.BATCH_TURN_S:
                self._stop()
                raise
        return began_s - self._renewed_s < bounds.BATCH_TURN_S

    def _next(self, names: list[BatchName]) -> BatchName | None:
        """Returns the batch that starts next: the oldest of the owner of which the fewest run."""
        if len(self._running) >= bounds.MAX_RUNNING:
            return None
        running = Counter(name.owner for name in self._running)
        latest_s = time.monotonic() - self._timing.again_s
        waiting = [
            name for name in names if name not in self._running and self._failed_s.get(name, float("-inf")) <= latest_s
        ]
        allowed = [name for name in waiting if running[name.owner] < bounds.MAX_RUNNING_OF_ONE]
        return min(allowed, key=lambda name: (running[name.owner], name.batch_id), default=None)

    def _start(self, name: BatchName, record: BatchRecord) -> None:
        loop = asyncio.get_running_loop()

        def make_sender(retry_s: float) -> LineSender:
            transport = LineTransport(self._post, record.caller, loop, self.places, LINE_S)
            options = SenderOptions(
                "http://localhost", None, self.places.most, retry_s, max_answer_bytes=bounds.MAX_ANSWER_BYTES
            )
            return LineSender(options, transport=transport)

        work = BatchWork(
            self.store,
            record,
            lambda: self._find_caller(record.caller) is not None,
            make_sender,
            self.places.most,
            self._finishing,
            self._timing,
        )
        self._running[name] = work
        future = loop.run_in_executor(self._threads, work.run)
        future.add_done_callback(lambda done: self._end(name, done))

    def _end(self, name: BatchName, done: asyncio.Future[Ending | None]) -> None:
        del self._running[name]
        error = None if done.cancelled() else done.exception()
        if isinstance(error, TurnLost):
            logger.warning("batch %s: %s", name.batch_id, error.message)
        elif error is not None:
            self._failed_s[name] = time.monotonic()
            logger.error("batch %s could not go on; it is run again later", name.batch_id, exc_info=error)
        elif not done.cancelled() and (ending := done.result()) is not None:
            self.endings[ending] += 1

    def _stop(self) -> None:
        """Makes the batches that run here end soon. They go on where the lease is."""
        for work in self._running.values():
            work.stopped.set()
