"""The time that a fetch has left. Every wait of a fetch asks for it, so a slow source and a stop both end the fetch."""

from __future__ import annotations

import threading
import time

from lorafleet.protocol.errors import AdapterUnavailable

SOCKET_S = 20.0  # longest silence of a connection before it is closed and tried again
STOP_POLL_S = 0.2


class FetchDeadline:
    """The end of one fetch. `what` describes the fetch in messages; setting `stop` from outside ends it at once."""

    def __init__(self, timeout_s: float, what: str, stop: threading.Event) -> None:
        self._timeout_s = timeout_s
        self._what = what
        self._stop = stop
        self._ends_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Returns the seconds that are left, more than 0. Raises AdapterUnavailable if there is no time left."""
        if self._stop.is_set():
            raise AdapterUnavailable(f"{self._what} was stopped: the process is ending.")
        left = self._ends_s - time.monotonic()
        if left <= 0:
            raise AdapterUnavailable(
                f"{self._what} took longer than {self._timeout_s:g} s and was canceled. Try again, or raise timeout_s."
            )
        return left

    def socket_s(self) -> float:
        """Returns the timeout in seconds for the next wait on a connection."""
        return min(SOCKET_S, self.left_s())

    def sleep(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (rest := ends - time.monotonic()) > 0:
            self._stop.wait(min(rest, self.left_s(), STOP_POLL_S))
        self.left_s()

    def until(self, stop: threading.Event) -> FetchDeadline:
        """Returns a deadline with the same end that another event stops. The parts of one download use it."""
        other = FetchDeadline(self._timeout_s, self._what, stop)
        other._ends_s = self._ends_s
        return other
