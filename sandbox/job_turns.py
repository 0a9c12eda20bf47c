"""Fair scheduling of jobs from many clients on a few processes or threads.

Jobs wait in groups: one per tenant, or one per adapter where there are no tenants. The groups take turns. If there is
more than one place, no group may occupy all of them. Each group's queue is bounded. So a client waits for its own
jobs, and for at most one earlier job of each other group.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")
_MEAN_WEIGHT = 0.1  # Weight of the newest job in the mean duration of jobs.


@dataclass(frozen=True, slots=True)
class TurnLimits:
    running: int  # Jobs that run at a time.
    waiting: int  # Jobs of one group that may wait; further ones are rejected.
    waiting_in_all: int = 1024  # Jobs of all groups together that may wait.

    @property
    def running_of_one(self) -> int:
        """The number of places that one group may take: never the last one."""
        return max(1, self.running - 1)


class NoRoom(Exception):
    """An error that means that a queue is full. The message gives the numbers."""


class TurnQueue(Generic[Job]):
    """The order of the waiting jobs. It does not run them."""

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # groups in the order of their next turns
        self._running: Counter[str] = Counter()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def put(self, group: str, job: Job) -> None:
        """Adds a job to the group's queue. Raises NoRoom if a queue is full."""
        num_of_group = len(self._waiting.get(group, ()))
        if num_of_group >= self._limits.waiting:
            raise NoRoom(
                f"{num_of_group} jobs of the same tenant or model are waiting; at most {self._limits.waiting} may wait"
            )
        if self._num_waiting >= self._limits.waiting_in_all:
            raise NoRoom(
                f"{self._num_waiting} jobs are already waiting; at most {self._limits.waiting_in_all} may wait in total"
            )
        self._waiting.setdefault(group, deque()).append(job)
        self._num_waiting += 1

    def take(self) -> tuple[str, Job] | None:
        """Returns the next job and its group; done() must follow. Returns None if no job may start now."""
        if self._running.total() >= self._limits.running:
            return None
        group = next((g for g in self._waiting if self._running[g] < self._limits.running_of_one), None)
        if group is None:
            return None
        job = self._waiting[group].popleft()
        self._num_waiting -= 1
        self._waiting.move_to_end(group)
        if not self._waiting[group]:
            del self._waiting[group]
        self._running[group] += 1
        return group, job

    def done(self, group: str) -> None:
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]

    def remove(self, group: str, job: Job) -> bool:
        """Removes a waiting job from the queue. Returns False if it is not waiting."""
        jobs = self._waiting.get(group)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        self._num_waiting -= 1
        if not jobs:
            del self._waiting[group]
        return True


class JobTurns:
    """Runs coroutines of one event loop in the order of a TurnQueue."""

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        self._queue: TurnQueue[asyncio.Future[None]] = TurnQueue(limits)
        self._mean_s = 0.0

    @property
    def retry_after_s(self) -> float:
        """The expected time in seconds until the waiting jobs are done, estimated from earlier jobs."""
        return min(60.0, max(1.0, len(self._queue) * self._mean_s / self._limits.running))

    @asynccontextmanager
    async def turn(self, group: str) -> AsyncIterator[None]:
        """Waits for the group's turn, which lasts until the end of the block. Raises NoRoom."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(group, granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not self._queue.remove(group, granted):
                self._end(group)
            raise
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._mean_s += _MEAN_WEIGHT * (time.monotonic() - began_s - self._mean_s)
            self._end(group)

    def _end(self, group: str) -> None:
        self._queue.done(group)
        self._grant()

    def _grant(self) -> None:
        while (taken := self._queue.take()) is not None:
            _, granted = taken
            if not granted.done():  # otherwise its client has just left, and turn() frees the place
                granted.set_result(None)
