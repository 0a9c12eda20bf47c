"""Runs long work a little at a time, on an event loop that must go on answering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

SLICE_S = 0.002  # Seconds of work, followed by as many seconds for other tasks.


async def in_slices(steps: Iterator[None], clock: Callable[[], float] = time.perf_counter) -> None:
    """Runs the steps, each of which must be short. The event loop is free between slices."""
    until = clock() + SLICE_S
    for _ in steps:
        if clock() >= until:
            await asyncio.sleep(SLICE_S)
            until = clock() + SLICE_S
