"""The interface of tool call parsers: a model's text goes in as it arrives; text and calls come out.

Each format has one file: hermes.py, llama3.py, mistral.py. forced.py parses the form that the server itself demands.
Text that begins like a call and is none is shown as text. A possible beginning of a marker is held back until it is
decided, so half a marker is never shown.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from lorafleet.api.tool_calls.json_scanner import BLANKS


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call."""

    index: int  # Index of the call within the answer.
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, JSON as the model wrote it."""

    index: int
    text: str


Event = Text | CallStart | CallArguments


class ToolCallParser(Protocol):
    """A parser for the text of one answer."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Returns the remaining events at the end of the answer."""
        ...


def openai_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


class Calls:
    """The calls of one answer so far.

    Args:
        offered: Names of the request's functions; a call of any other function is no call.
        eager: If true, a call begins as soon as its name is known and its arguments begin. Streams need this, and
            cannot take the call back then. If false, a call begins when it is complete.
    """

    def __init__(self, offered: Collection[str], *, eager: bool, new_id: Callable[[], str] = openai_id) -> None:
        self.offered = frozenset(offered)
        self.eager = eager
        self.count = 0
        self._new_id = new_id

    def start(self, name: str) -> CallStart:
        self.count += 1
        return CallStart(self.count - 1, self._new_id(), name)


class MarkerSearch:
    """Splits text at markers. Holds back a possible beginning of a marker, and blanks, which have no meaning before a
    marker."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._beginnings = frozenset(marker[:k] for marker in markers for k in range(1, len(marker)))
        self._longest = max(map(len, markers))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """Returns (text before the marker, the marker or None, text after it)."""
        buffer = self._held + text
        found = [(begin, marker) for marker in self._markers if (begin := buffer.find(marker)) >= 0]
        if found:
            begin, marker = min(found)
            self._held = ""
            return buffer[:begin].rstrip(BLANKS), marker, buffer[begin + len(marker) :]
        shown = len(buffer) - self._num_begun(buffer)
        shown = len(buffer[:shown].rstrip(BLANKS))
        self._held = buffer[shown:]
        return buffer[:shown], None, ""

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _num_begun(self, buffer: str) -> int:
        for k in range(min(self._longest - 1, len(buffer)), 0, -1):
            if buffer[-k:] in self._beginnings:
                return k
        return 0


def shown(text: str) -> list[Event]:
    return [Text(text)] if text else []


def last_words(text: str, calls: Calls) -> list[Event]:
    """Returns the last text of an answer as events. Blanks after calls have no meaning and are dropped."""
    return shown(text) if text.strip(BLANKS) or not calls.count else []
