"""Makes a load yield to the engine loop. They share one GIL, which a thread holds for 5 ms unless it waits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

HOLD_S = 300e-6  # time between pauses; a pause takes 0.1 to 0.2 ms with the timer's slack
PAUSE_S = 50e-6  # a sleep of 0 s would take the GIL back before another thread is awake


def yielding_gil(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, with a pause after every HOLD_S."""
    due = time.perf_counter() + HOLD_S
    for item in items:
        if time.perf_counter() >= due:
            time.sleep(PAUSE_S)
            due = time.perf_counter() + HOLD_S
        yield item
