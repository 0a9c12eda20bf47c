"""Runs blocking work in threads, so that no client's work delays the server's own or another tenant's.

The server's duties (reading API keys again, logs, /metrics, health) have threads that no request can occupy. Everything
else belongs to a kind of work. Each kind has threads of its own, for which tenants take turns, and a bounded queue for
each tenant. asyncio's default threads have neither, so nothing else runs there: tests/test_threads.py forbids it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.sandbox.job_turns import TurnLimits

DUTY_THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkKind:
    """A kind of work. The limits hold for one process."""

    name: str  # The name that error messages use.
    limits: TurnLimits


CHECKS = WorkKind("checks of requests", TurnLimits(running=2, waiting=128))
FILES = WorkKind("files and batches", TurnLimits(running=8, waiting=64))
PUSHED_BYTES = WorkKind("bytes of pushes", TurnLimits(running=4, waiting=128))
CATALOGUE_LOG = WorkKind("the catalogue's log", TurnLimits(running=2, waiting=128))
CATALOGUE_FILES = WorkKind("the catalogue's files", TurnLimits(running=8, waiting=128))
# What the server does for itself and may take long, and what must be done after a request. It is never rejected: the
# requests that cause it are bounded.
UPKEEP = WorkKind("upkeep", TurnLimits(running=4, waiting=sys.maxsize, waiting_in_all=sys.maxsize))

_group: ContextVar[str] = ContextVar("lorafleet.work_group", default="the server")


class _WorkThreads:
    """The threads of one event loop."""

    def __init__(self) -> None:
        self.duties = ThreadPoolExecutor(DUTY_THREADS, thread_name_prefix="duty")
        self._kinds: dict[WorkKind, FairThreads] = {}

    def of(self, kind: WorkKind) -> FairThreads:
        if kind not in self._kinds:
            self._kinds[kind] = FairThreads(kind.name, kind.limits)
        return self._kinds[kind]


# These belong to an event loop and end with it, like asyncio's default threads.
_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, _WorkThreads] = WeakKeyDictionary()


def work_for(group: str) -> None:
    """Says whose turn the work of this asyncio task, and of tasks that it starts, takes: that of a tenant or key."""
    _group.set(group)


async def in_turn(kind: WorkKind, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs the work in a thread of its kind, when it is the turn of whoever this task works for. Raises QueueFull if
    too much of their work of this kind waits."""
    return await _of_this_loop().of(kind).run(_group.get(), partial(work, *args, **kwargs))


async def on_duty(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs one of the server's duties in a thread that no request can occupy. It must not wait for the network."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_of_this_loop().duties, partial(work, *args, **kwargs))


def _of_this_loop() -> _WorkThreads:
    loop = asyncio.get_running_loop()
    if loop not in _threads:
        _threads[loop] = _WorkThreads()
    return _threads[loop]
