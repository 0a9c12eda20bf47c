"""Finds out how many requests a server takes at a time: the number grows while they are answered, and shrinks when one
is refused, as TCP's congestion window does."""

from __future__ import annotations

import asyncio

FIRST = 8.0
SHRINK = 0.75


class RequestWindow:
    """The requests in flight. `most` is the largest number of them."""

    def __init__(self, most: int) -> None:
        self.limit = min(FIRST, float(most))
        self._most = most
        self._num_in_flight = 0
        self._doubles = True  # Until the first refusal, the limit doubles in the time of one answer.
        self._num_begun = 0
        self._begun_at_cut = 0  # A refusal of a request that began before the last one changes nothing.
        self._changed = asyncio.Condition()

    async def enter(self) -> int:
        """Waits until one more request may be sent. Returns its number, for leave()."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_in_flight < int(self.limit))
            self._num_in_flight += 1
            self._num_begun += 1
            return self._num_begun

    async def leave(self, number: int, *, refused: bool) -> None:
        """Records the end of a request. `refused` says that the server was too busy for it."""
        async with self._changed:
            was_full = self._num_in_flight >= int(self.limit)
            self._num_in_flight -= 1
            if refused and number > self._begun_at_cut:
                self.limit = max(1.0, self.limit * SHRINK)
                self._doubles, self._begun_at_cut = False, self._num_begun
            elif not refused and was_full:
                self.limit = min(float(self._most), self.limit + (1.0 if self._doubles else 1.0 / self.limit))
            self._changed.notify_all()
