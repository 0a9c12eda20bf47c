"""Work that many may ask for at once, and whose result is the same for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedRun(Generic[T]):
    """Runs the work once at a time. All who ask while it runs share that run."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Future[T] | None = None

    async def __call__(self) -> T:
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._work())
        return await asyncio.shield(self._running)  # a client that leaves must not cancel the others' run
