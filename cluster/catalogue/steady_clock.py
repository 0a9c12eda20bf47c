"""The time by which stored files, their locks, and batches expire, so that a clock that jumps for a moment neither ends
nor deletes them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

SETTLE_S = 600.0  # A jump that has lasted so long is believed.
DRIFT_S = 5.0  # Smaller differences are no jumps: they are followed at once, as when the clock is slowed down or set.

logger = logging.getLogger("lorafleet.cluster")


def uptime_s() -> float:
    """Returns the seconds since the machine has started. Unlike those of time.monotonic(), they go on during a suspend,
    after which the machine's clock is right and has not jumped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Seconds since 1970 that go on evenly while the machine's clock has jumped, until the jump has lasted.

    Threads may call it together.

    Args:
        wall: The machine's clock, in seconds since 1970.
        monotonic: A clock that never jumps, in seconds. It goes on while the machine is suspended.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = uptime_s,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._settle_s = settle_s
        self._offset_s = wall() - monotonic()
        self._jump: tuple[float, float] | None = None  # The offset after it, and when it was seen.
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            now_s = self._monotonic()
            self._follow(now_s, self._wall() - now_s)
            return now_s + self._offset_s

    def _follow(self, now_s: float, offset_s: float) -> None:
        if abs(offset_s - self._offset_s) <= DRIFT_S:
            self._offset_s, self._jump = offset_s, None
        elif self._jump is None or abs(offset_s - self._jump[0]) > DRIFT_S:
            self._jump = offset_s, now_s
            logger.warning(
                "the machine's clock has jumped by %.0f s; stored files and batches go by the time before for %.0f s. "
                "Check the node's time synchronization.",
                offset_s - self._offset_s,
                self._settle_s,
            )
        elif now_s - self._jump[1] >= self._settle_s:
            self._offset_s, self._jump = offset_s, None
