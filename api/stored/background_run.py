"""Generates one response in the background, which goes on when the client has left, until it ends or is canceled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

logger = logging.getLogger("lorafleet.http")


class BackgroundAnswer(Protocol):
    def run(self) -> AsyncGenerator[bytes, None]:
        """Yields the response's events as they come. A failure becomes the last event."""
        ...

    def end_early(self, status: str) -> bytes:
        """Ends the response as canceled or failed, and returns its last events."""
        ...

    def encoded(self) -> bytes:
        """Returns the JSON of the response as it is now."""
        ...


class BackgroundRun:
    """The task that generates a response, and its events so far, by number.

    Args:
        records: Whether clients may ask for the events.
        on_end: Called once when the response has ended.
    """

    def __init__(self, answer: BackgroundAnswer, on_end: Callable[[], None], *, records: bool) -> None:
        self.events: list[bytes] = []
        self.answer = answer
        self._on_end = on_end
        self._records = records
        self._changed = asyncio.Event()  # Set, and replaced by a new one, at each change.
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def cancel(self) -> None:
        """Ends the response as canceled, unless it has ended."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def wait_for_events(self, after: int, at_most_s: float) -> list[bytes]:
        """Returns the events after this number, and waits for one if there is none yet."""
        if len(self.events) <= after + 1 and self.is_running:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), at_most_s)
        return self.events[after + 1 :]

    async def _run(self) -> None:
        try:
            async with aclosing(self.answer.run()) as written:
                async for events in written:
                    self._add(events)
        except asyncio.CancelledError:
            self._add(self.answer.end_early("cancelled"))
        except Exception:
            logger.exception("a response in the background failed")
            self._add(self.answer.end_early("failed"))
        finally:
            self._on_end()

    def _add(self, events: bytes) -> None:
        if not self._records:
            return
        self.events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
