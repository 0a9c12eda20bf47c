"""How long a fetch may still take. Every wait of a fetch asks here, so that a slow source and a stop both end it."""

from __future__ import annotations

import threading
import time

from lorafleet.protocol.errors import AdapterUnavailable

SOCKET_S = 20.0  # longest silence of a connection before it is given up and tried again
STOP_POLL_S = 0.2


class Deadline:
    """what: for the message. stop: set from outside to end the fetch at once."""

    def __init__(self, timeout_s: float, what: str, stop: threading.Event) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._stop = stop
        self._ends_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Positive. AdapterUnavailable once there is no time left."""
        if self._stop.is_set():
            raise AdapterUnavailable(f"{self._what} was stopped: the process is ending.")
        left = self._ends_s - time.monotonic()
        if left <= 0:
            raise AdapterUnavailable(
                f"{self._what} took longer than {self._timeout_s:g} s and was given up. Try again, or raise timeout_s."
            )
        return left

    def socket_s(self) -> float:
        """For the next wait on a connection."""
        return min(SOCKET_S, self.left_s())

    def sleep(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (rest := ends - time.monotonic()) > 0:
            self._stop.wait(min(rest, self.left_s(), STOP_POLL_S))
        self.left_s()

    def until(self, stop: threading.Event) -> Deadline:
        """The same end, with another event that stops it: for the parts of one download."""
        other = Deadline(self._timeout_s, self._what, stop)
        other._ends_s = self._ends_s
        return other
