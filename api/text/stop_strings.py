"""Searches streamed text for stop strings. It passes text on until a stop string is complete, and holds back what
could be the beginning of one.

On average each character costs constant time per stop string. Each stop string takes memory in proportion to its
length. The search uses the failure function of Knuth, Morris and Pratt, which the samples of a request share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

KNOWN_STOPS = 256  # Cached failure functions, of stop strings of MAX_STOP_CHARS at most.


class StopStrings:
    """A search for several stop strings. The one that is complete first ends the text, so the result does not depend
    on how the text was divided into pieces. If several are complete at once, the longest counts."""

    __slots__ = ("_include", "_matchers", "held")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._include = include
        self._matchers = [_Matcher(stop) for stop in stops]
        self.held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Returns the text to show, and the stop string that ended it or None.

        If `may_stop` is false, a stop string that this text completes does not count.
        """
        if not text:
            return "", None
        found = [(end, -len(m.stop), m.stop) for m in self._matchers if (end := m.push(text, may_stop=may_stop))]
        buffer = self.held + text
        if found:
            end, _, stop = min(found)
            end += len(self.held)
            self.held = ""
            return buffer[: end if self._include else end - len(stop)], stop
        shown = len(buffer) - max(matcher.num_matched for matcher in self._matchers)
        self.held = buffer[shown:]
        return buffer[:shown], None

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


class _Matcher:
    """A search for one stop string. `num_matched` is the number of its characters that the text ends with."""

    __slots__ = ("_failure", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._failure = _failure_function(stop)

    def push(self, text: str, *, may_stop: bool) -> int:
        """Returns the length of the shortest beginning of `text` that completes the stop string, or 0 if there is
        none."""
        if not self.num_matched and self.stop[0] not in text:
            return 0
        for i, character in enumerate(text):
            self._advance(character)
            if self.num_matched == len(self.stop):
                self.num_matched = self._failure[-1]
                if may_stop:
                    return i + 1
        return 0

    def _advance(self, character: str) -> None:
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._failure[matched - 1]
        self.num_matched = matched + (self.stop[matched] == character)


@lru_cache(KNOWN_STOPS)
def _failure_function(stop: str) -> array[int]:
    """Returns, for each prefix of `stop`, the length of its longest proper suffix that is also a prefix."""
    failure = array("I", [0])
    matched = 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = failure[matched - 1]
        matched += stop[matched] == character
        failure.append(matched)
    return failure
