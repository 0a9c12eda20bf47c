"""Which replica does what only one of them should do: whoever asks first, until it has not asked again for a while.
Kept in the directory's process; after its restart the next to ask has the turn."""

from __future__ import annotations

import time
from collections.abc import Callable


class Turns:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: dict[str, tuple[str, float]] = {}  # by task: the replica, and until when

    def take(self, task: str, replica_id: str, for_s: float) -> bool:
        """Whether it is the replica's turn, from now on for so long."""
        now = self._clock()
        holder, until_s = self._taken.get(task, (replica_id, now))
        if holder != replica_id and now < until_s:
            return False
        self._taken[task] = (replica_id, now + for_s)
        return True
