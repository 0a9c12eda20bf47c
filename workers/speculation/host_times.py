"""Measures what the host does between the end of a step and the launch of one with drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HostTimes:
    """The times of one engine's host, by a clock of seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._drafting_s = 0.0  # Seconds that a drafter took since the last step ended.
        # When all tokens before the next step were known. None if it is planned before.
        self._settled_s: float | None = None
        self._is_behind_drafts = False

    def begin(self, *, is_settled: bool, is_behind_drafts: bool) -> None:
        """Takes in whether the next step is planned when the one in flight has ended, which step_ended() says then, and
        whether the latter has drafts."""
        self._settled_s = self._clock() if is_settled else None
        self._is_behind_drafts = is_behind_drafts

    def nothing_to_launch(self) -> None:
        """Takes in that no step follows, so that the device does not wait for the host."""
        self._settled_s = None

    def step_ended(self) -> float:
        """Takes in that the host has read the tokens of a step. Returns the seconds that a drafter took before it."""
        if self._settled_s is not None:
            self._settled_s = self._clock()
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        return drafting_s

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Counts the time of the block as a drafter's."""
        began_s = self._clock()
        yield
        self._drafting_s += self._clock() - began_s

    def launched(self, launched_s: float) -> float | None:
        """Takes in when a step was launched, by the clock. Returns for how long the device has waited for the host
        behind a step with drafts, without the drafter. Returns None if it has not waited, or not behind such a step."""
        settled_s, self._settled_s = self._settled_s, None
        if settled_s is None or not self._is_behind_drafts:
            return None
        return max(0.0, launched_s - settled_s - self._drafting_s)
