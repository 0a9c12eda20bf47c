"""Works on the bytes of a push in threads while further bytes arrive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future

STEP_BYTES = 4 << 20  # Pushes take turns after each step, so that a large one does not delay a small one.


class ByteFollower:
    """Calls `follow` with the start and the end of bytes that have arrived, in order and one call at a time.

    Args:
        pool: Its threads make the calls.
        num_bytes: Number of all bytes that will arrive.
    """

    def __init__(self, pool: Executor, follow: Callable[[int, int], None], num_bytes: int) -> None:
        self._pool = pool
        self._follow = follow
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._arrived = self._followed = 0
        self._is_running = self._is_stopping = False
        self._done: Future[None] = Future()
        if not num_bytes:
            self._done.set_result(None)  # Nothing will arrive.

    def advance(self, num_arrived: int) -> None:
        """Says how many bytes have arrived. Any thread may call it."""
        with self._lock:
            self._arrived = num_arrived
            starts = not self._is_running and not self._done.done() and self._has_step()
            self._is_running = self._is_running or starts
        if starts:
            self._pool.submit(self._step)

    async def done(self) -> None:
        """Waits until all bytes were followed. Raises the error of a call."""
        await asyncio.shield(asyncio.wrap_future(self._done))

    async def stop(self) -> None:
        """Waits until no call runs and makes no further ones."""
        with self._lock:
            self._is_stopping = True
            if not self._is_running and not self._done.done():
                self._done.set_result(None)
        await asyncio.wait([asyncio.wrap_future(self._done)])

    def _has_step(self) -> bool:
        waiting = self._arrived - self._followed
        return waiting >= STEP_BYTES or (self._arrived == self._num_bytes and waiting > 0)

    def _step(self) -> None:
        start, end = self._followed, min(self._followed + STEP_BYTES, self._arrived)
        try:
            self._follow(start, end)
        except BaseException as error:
            self._done.set_exception(error)
            return
        with self._lock:
            self._followed = end
            if self._is_stopping or end == self._num_bytes:
                self._done.set_result(None)
                return
            self._is_running = self._has_step()
        if self._is_running:
            self._pool.submit(self._step)
