"""Long work on an event loop that must go on answering: a little at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

SLICE_S = 0.002  # of work, and then as long for the others


async def in_slices(steps: Iterator[None], clock: Callable[[], float] = time.perf_counter) -> None:
    """Runs the steps, each of which must be short; between slices the loop is free."""
    until = clock() + SLICE_S
    for _ in steps:
        if clock() >= until:
            await asyncio.sleep(SLICE_S)
            until = clock() + SLICE_S
