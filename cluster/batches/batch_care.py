"""Deletes what has expired in the batch store now and then, beside the other work of the replica that runs batches.

It may take longer than the lease on the batches lasts, so nothing that renews the lease may wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from lorafleet.api.access.work_threads import UPKEEP, in_turn
from lorafleet.cluster.batches.batch_store import BatchStore

CARE_S = 600.0  # Interval between deletions of what has expired.

logger = logging.getLogger("lorafleet.cluster")


class BatchCare:
    """The deletions of one replica.

    Args:
        finishing: Held during the deletions, and by others while they write output files.
    """

    def __init__(self, store: BatchStore, finishing: threading.Lock) -> None:
        self._store = store
        self._finishing = finishing
        self._began_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start_if_due(self) -> None:
        """Starts the deletions if CARE_S have passed and the last ones have ended."""
        is_running = self._task is not None and not self._task.done()
        if not is_running and time.monotonic() - self._began_s >= CARE_S:
            self._began_s = time.monotonic()
            self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await in_turn(UPKEEP, self._delete)
        except Exception as error:  # The store may be unavailable for a while.
            logger.warning("files and batches that have expired could not be deleted: %r", error)

    def _delete(self) -> None:
        with self._finishing:
            self._store.care()
