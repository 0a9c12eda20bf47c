"""Makes a load yield to the engine loop. They share one GIL, which a thread holds for 5 ms unless it waits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

EVERY = 32  # items between pauses, some hundred microseconds of work
PAUSE_S = 50e-6  # a sleep of 0 s would take the GIL back before another thread is awake


def yielding_gil(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, with a pause once in EVERY items."""
    for i, item in enumerate(items):
        if i % EVERY == EVERY - 1:
            time.sleep(PAUSE_S)
        yield item
