"""Remembers for a while what had to be ended, so that it is rejected without another try."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

SHUN_S = 60.0
MAX_SHUNNED = 1024


class Shunned:
    """Threads may share it. Keys hold the group that asked: what one tenant provokes is not held against others."""

    def __init__(self, shun_s: float = SHUN_S) -> None:
        self._shun_s = shun_s
        self._lock = threading.Lock()
        self._until: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()

    def add(self, group: str, digest: str, why: str) -> None:
        with self._lock:
            self._until[group, digest] = time.monotonic() + self._shun_s, why
            while len(self._until) > MAX_SHUNNED:
                self._until.popitem(last=False)

    def why(self, group: str, digest: str) -> str | None:
        """Why it is not tried now; None where it may be."""
        with self._lock:
            until_s, why = self._until.get((group, digest), (0.0, ""))
        if until_s <= time.monotonic():
            return None
        return f"{why}, and is not tried again for {self._shun_s:g} s"
