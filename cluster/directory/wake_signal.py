"""Wakes tasks that wait for a condition, such as the long polls of replicas and routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class WakeSignal:
    """A signal that wakes all tasks that wait at that moment. A task checks its condition right before it waits, and
    again when it is woken."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event, before = asyncio.Event(), self._event
        before.set()

    async def wait(self, deadline_s: float) -> bool:
        """Returns True when the signal has come, or False once the deadline has passed."""
        try:
            await asyncio.wait_for(self._event.wait(), deadline_s - self._clock())
        except TimeoutError:
            return False
        return True
