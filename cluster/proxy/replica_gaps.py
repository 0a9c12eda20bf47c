"""Measures how long applications are without a replica, so that clients learn when to try again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from lorafleet.cluster.proxy.waiting_room import EXPECTED_S


class ReplicaGaps:
    """Times from an application's last replica to its next one, or from its deployment to its first one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: dict[str, float] = {}  # Since when each application has had no replica.
        self.expected_s = EXPECTED_S  # Length of the last gap that has ended.

    def update(self, deployed: Collection[str], with_replicas: Collection[str]) -> None:
        """Takes the names of all applications, and of those that have replicas."""
        for name, began_s in list(self._began_s.items()):
            if name in with_replicas:
                self.expected_s = max(1, round(self._clock() - began_s))
            if name in with_replicas or name not in deployed:
                del self._began_s[name]
        for name in deployed:
            if name not in with_replicas:
                self._began_s.setdefault(name, self._clock())
