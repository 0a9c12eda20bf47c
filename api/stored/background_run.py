"""Generates one response in the background, which goes on when the client has left, until it ends or is canceled.

Its events and its answer so far count as stored while they grow. If they exceed what their owner may store, the oldest
events are dropped, since the final response says the same; if that is not enough, the response fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from lorafleet.protocol.errors import QueueFull

PAGE_BYTES = 1 << 20  # Events that wait_for_events() returns at a time, and one more.

logger = logging.getLogger("lorafleet.http")


class BackgroundAnswer(Protocol):
    @property
    def num_bytes(self) -> int:
        """About how many bytes the answer has so far."""
        ...

    def run(self) -> AsyncGenerator[bytes, None]:
        """Yields the response's events at each step, or b"" if a step has none. A failure becomes the last event."""
        ...

    def end_early(self, status: str, failure: QueueFull | None = None) -> bytes:
        """Ends the response as canceled or failed, and returns its last events."""
        ...

    def encoded(self) -> bytes:
        """Returns the JSON of the response as it is now."""
        ...


class BackgroundRun:
    """The task that generates a response, and its events so far, by number.

    Args:
        fits: Counts the bytes of the run anew. Returns whether they are within the bounds of the store.
        on_end: Called once when the response has ended.
        records: Whether clients may ask for the events.
    """

    def __init__(
        self, answer: BackgroundAnswer, fits: Callable[[], bool], on_end: Callable[[], None], *, records: bool
    ) -> None:
        self.answer = answer
        self.num_dropped = 0  # The first events, which are not kept any more.
        self.num_event_bytes = 0
        self._events: list[bytes] = []  # Those from number `num_dropped` on.
        self._fits = fits
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
        await self.ended()

    async def ended(self) -> None:
        """Waits until the response has ended."""
        await asyncio.wait([self._task])

    async def wait_for_events(self, after: int, at_most_s: float) -> list[bytes]:
        """Returns the next events after this number, and waits for one if there is none yet. Returns none if some of
        them have been dropped."""
        if self.num_dropped + len(self._events) <= after + 1 and self.is_running:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), at_most_s)
        first = after + 1 - self.num_dropped
        if first < 0:
            return []
        num_bytes, page = 0, list[bytes]()
        for event in itertools.islice(self._events, first, None):
            page.append(event)
            num_bytes += len(event)
            if num_bytes >= PAGE_BYTES:
                break
        return page

    async def _run(self) -> None:
        try:
            async with aclosing(self.answer.run()) as written:
                async for events in written:
                    self._add(events)
                    self._make_room()
        except asyncio.CancelledError:
            self._add(self.answer.end_early("cancelled"))
        except QueueFull as full:
            self._add(self.answer.end_early("failed", full))
        except Exception:
            logger.exception("a response in the background failed")
            self._add(self.answer.end_early("failed"))
        finally:
            with contextlib.suppress(QueueFull):
                self._make_room()  # The last events repeat the answer.
            self._on_end()

    def _add(self, events: bytes) -> None:
        if not self._records or not events:
            return
        added = [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._events += added
        self.num_event_bytes += sum(map(len, added))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _make_room(self) -> None:
        """Drops the older half of the events until the run fits. Raises QueueFull if it does not without events."""
        while not self._fits():
            if not self._events:
                raise QueueFull(
                    f"This response has about {self.answer.num_bytes} bytes so far, and its tenant's responses in the "
                    "background have together more than half of what this replica may store. Ask for fewer responses "
                    "at a time or for fewer logprobs, or ask the operator to raise --response-store-bytes."
                )
            self._drop((len(self._events) + 1) // 2)

    def _drop(self, num_events: int) -> None:
        self.num_event_bytes -= sum(map(len, self._events[:num_events]))
        del self._events[:num_events]
        self.num_dropped += num_events
