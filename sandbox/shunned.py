"""Records jobs that had to be ended, so that they are rejected for a while without another try."""

from __future__ import annotations

import threading
import time

from lorafleet.protocol.lru_cache import LRUCache

SHUN_S = 60.0
MAX_SHUNNED = 1024


class Shunned:
    """Recently ended jobs by group and digest. Threads may share it. The key includes the group, so that a failure
    caused by one tenant does not affect others."""

    def __init__(self, shun_s: float = SHUN_S) -> None:
        self._shun_s = shun_s
        self._lock = threading.Lock()
        self._until: LRUCache[tuple[str, str], tuple[float, str]] = LRUCache(MAX_SHUNNED)

    def add(self, group: str, digest: str, why: str) -> None:
        with self._lock:
            self._until.put((group, digest), (time.monotonic() + self._shun_s, why))

    def why(self, group: str, digest: str) -> str | None:
        """Returns the reason why the job is not tried now, or None if it may be tried."""
        with self._lock:
            until_s, why = self._until.get((group, digest)) or (0.0, "")
        if until_s <= time.monotonic():
            return None
        return f"{why}, and is not tried again for {self._shun_s:g} s"
