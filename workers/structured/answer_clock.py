"""Measures how long a process of grammar_process.py leaves requests for masks, and pings, unanswered."""

from __future__ import annotations

import time
from collections.abc import Callable

PING_S = 1.0  # between two pings of a process that compiles
_PATIENCE_AFTER_LATE = 0.05  # fraction of the wait that a process is given if it was late the last time


class AnswerClock:
    """Tells when a process that does not answer should be pinged, waited for, or ended.

    Args:
        mask_s: Seconds that the process may take for the masks of one step.
        ping_s: Seconds for which it may leave a ping unanswered.
    """

    def __init__(self, mask_s: float, ping_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._mask_s, self._ping_s = mask_s, ping_s
        self._clock = clock
        self._masks_asked_s: float | None = None  # time of the last start_masks(), until take_masks()
        # whether the masks that were requested last are late, and those before were
        self._is_late, self._was_late = False, False
        self.pinged_s = -PING_S  # time of the last ping
        self._is_pinged = False  # whether the last ping is unanswered

    @property
    def awaits_masks(self) -> bool:
        return self._masks_asked_s is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the process exceeds its limit for masks, or for the answer to a ping."""
        now_s = self._clock()
        is_late = self._masks_asked_s is not None and now_s - self._masks_asked_s > self._mask_s
        return is_late or (self._is_pinged and now_s - self.pinged_s > self._ping_s)

    def start_masks(self) -> None:
        self._masks_asked_s = self._clock()

    def patience_s(self, wait_s: float) -> float:
        """Returns the part of wait_s for which to wait. It is small if the process was late the last time."""
        return max(0.0, wait_s * (_PATIENCE_AFTER_LATE if self._was_late else 1))

    def miss_masks(self) -> None:
        """Records that the masks have not arrived in time."""
        self._is_late = True

    def take_masks(self) -> None:
        """Records that the masks have arrived."""
        self._masks_asked_s, self._was_late, self._is_late = None, self._is_late, False

    def start_ping(self) -> bool:
        """Records a ping and returns True, if one is due and none is unanswered."""
        if self._is_pinged or self._clock() - self.pinged_s <= PING_S:
            return False
        self.pinged_s, self._is_pinged = self._clock(), True
        return True

    def take_pong(self) -> None:
        """Records the answer to the ping. It may be called in another thread."""
        self._is_pinged = False
