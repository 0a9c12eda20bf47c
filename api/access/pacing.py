"""Loops over the many parts of one request, in which the event loop's other requests get their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

PARTS_A_TURN = 32  # Each costs some 50 us in most loops, so that others wait for a millisecond or two.


async def in_turns(parts: Iterable[T]) -> AsyncIterator[T]:
    for number, part in enumerate(parts):
        if number and number % PARTS_A_TURN == 0:
            await asyncio.sleep(0)
        yield part
