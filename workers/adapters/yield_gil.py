"""Lets the engine loop go first: a load's Python runs beside it under one GIL, which a thread keeps for 5 ms unless it
waits for something."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

EVERY = 32  # items, some hundred microseconds of work
PAUSE_S = 50e-6  # sleeping for 0 s would take the GIL back before another thread is awake


def giving_way(items: Iterable[T]) -> Iterator[T]:
    """The items, with pauses."""
    for i, item in enumerate(items):
        if i % EVERY == EVERY - 1:
            time.sleep(PAUSE_S)
        yield item
