"""Bounds the lines of all batches that are in flight. The bound may change while lines are."""

from __future__ import annotations

import asyncio

from lorafleet.cluster.task_set import TaskSet


class LinePlaces:
    """Places for lines in flight, each of which one line holds as a context."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._free = asyncio.Semaphore(most)
        self._taking = TaskSet()

    def set_most(self, most: int) -> None:
        """Changes the number of places. Lines that hold places beyond a smaller number end first."""
        more, self.most = most - self.most, most
        for _ in range(more):
            self._free.release()
        for _ in range(-more):
            self._taking.start(self._take())

    async def _take(self) -> None:
        await self._free.acquire()

    async def __aenter__(self) -> None:
        await self._free.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._free.release()
