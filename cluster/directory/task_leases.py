"""Leases for tasks that only one replica should do. The first replica to ask holds the lease until it has not asked
again for a while. Leases are stored in the directory's process; after its restart, the next replica to ask gets the
lease."""

from __future__ import annotations

import time
from collections.abc import Callable


class TaskLeases:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: dict[str, tuple[str, float]] = {}  # By task: the replica, and the end of its lease.

    def take(self, task: str, replica_id: str, for_s: float) -> bool:
        """Returns whether the replica holds the task's lease, which then lasts `for_s` seconds from now."""
        now = self._clock()
        holder, until_s = self._taken.get(task, (replica_id, now))
        if holder != replica_id and now < until_s:
            return False
        self._taken[task] = (replica_id, now + for_s)
        return True
