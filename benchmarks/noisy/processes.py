"""Attacks that stop processes of the server for a while, as on a machine that swaps or a node that is paused."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from noisy.hostile import Attack, Hostile

STOP_S = 6.0

DIRECTORY = "DirectoryActor"
ROUTER = "AdapterRouter"
FRONT = "EngineReplica"
ENGINE = "WorkerActor"


async def stopped_directory(hostile: Hostile) -> None:
    """Stops the adapter directory for six seconds while the hostile tenant requests names that it does not have."""
    await _stopped_for(hostile, DIRECTORY)


async def stopped_router(hostile: Hostile) -> None:
    """Stops the router for six seconds."""
    await _stopped_for(hostile, ROUTER)


async def stopped_front(hostile: Hostile) -> None:
    """Stops the HTTP process of one of two replicas for six seconds."""
    await _stopped_for(hostile, FRONT)


async def stopped_engine(hostile: Hostile) -> None:
    """Stops the engine of one of two replicas for six seconds."""
    await _stopped_for(hostile, ENGINE)


async def _stopped_for(hostile: Hostile, title: str) -> None:
    """Stops the first such process once, and sends requests at the same time."""
    pid = min(hostile.target.pids(title))
    flood = asyncio.create_task(hostile.flood(hostile.completion(), hostile.completion(model="unknown"), width=4))
    try:
        os.kill(pid, signal.SIGSTOP)
        hostile.seen["stopped"] += 1
        await asyncio.sleep(STOP_S)
    finally:
        flood.cancel()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


TITLES = (DIRECTORY, ROUTER, FRONT, ENGINE)

ATTACKS: tuple[Attack, ...] = (stopped_directory, stopped_router, stopped_front, stopped_engine)
