"""Shares one run of work among concurrent callers that all need the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedRun(Generic[T]):
    """Work of which one run is in progress at a time. Callers that come during a run share it."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Future[T] | None = None

    async def __call__(self) -> T:
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._work())
        return await asyncio.shield(self._running)  # A client that disconnects must not cancel the others' run.
