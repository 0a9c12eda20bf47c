"""Runs work that is too long for the event loop in a few threads, which are shared fairly among tenants."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lorafleet.protocol.errors import QueueFull
from lorafleet.sandbox.confinement import NICENESS
from lorafleet.sandbox.job_turns import JobTurns, NoRoom, TurnLimits

SWITCH_S = 0.0005  # A thread releases the GIL to the event loop after this time; the loop requests it after each call.

LONG_WORK = TurnLimits(running=2, waiting=128)  # Limits per front for long bodies, conversations and answers.

T = TypeVar("T")


class FairThreads:
    """A few threads of their own, so that asyncio's threads stay free for work that must not wait for this work."""

    def __init__(self, name: str, limits: TurnLimits) -> None:
        self._name = name
        self._turns = JobTurns(limits)
        self._pool = ThreadPoolExecutor(limits.running, thread_name_prefix=name, initializer=be_modest)

    async def run(self, group: str, work: Callable[[], T]) -> T:
        """Runs the work when the group is scheduled. Raises QueueFull if too many jobs of the group wait."""
        began = asyncio.Event()
        job = asyncio.create_task(self._in_turn(group, work, began))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if began.is_set():  # A job that began occupies its thread until it ends.
                job.add_done_callback(_forget)
            else:
                job.cancel()
            raise

    async def _in_turn(self, group: str, work: Callable[[], T], began: asyncio.Event) -> T:
        try:
            async with self._turns.turn(group):
                began.set()
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except NoRoom as full:
            raise QueueFull(
                f"This replica cannot queue more work of the kind {self._name!r} now: {full}. Try again later.",
                retry_after_s=self._turns.retry_after_s,
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _forget(job: asyncio.Task[T]) -> None:
    """Takes note of the error of a job that nobody waits for any more, so that asyncio does not log it."""
    if not job.cancelled():
        job.exception()


def be_modest() -> None:
    """Lowers the priority of this thread. On Linux each thread has a niceness of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    sys.setswitchinterval(SWITCH_S)
