"""The interface of tool call parsers: a model's text goes in as it arrives; text, reasoning and calls come out.

known.py lists the formats. thinking.py separates reasoning for formats of calls that have none. forced.py parses the
form that the server itself demands.
Text that begins like a call and is none is shown as text. A possible beginning of a marker is held back until it is
decided, so half a marker is never shown.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from lorafleet.api.tool_calls.json_scanner import BLANKS


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text by which the model prepares its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call."""

    index: int  # Index of the call within the answer.
    id: str
    name: str
    is_custom: bool = False  # The call is of a custom tool, whose input is text.


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, JSON as the model wrote it, or of a custom tool's input."""

    index: int
    text: str
    is_custom: bool = False


Event = Text | Reasoning | CallStart | CallArguments


class ToolCallParser(Protocol):
    """A parser for the text of one answer."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Returns the remaining events at the end of the answer."""
        ...


NewId = Callable[[str, int], str]  # Makes the id of a call from its function's name and its index.


def openai_id(_name: str, _index: int) -> str:
    return "call_" + uuid.uuid4().hex[:24]


class Calls:
    """The calls of one answer so far.

    Args:
        offered: Names of the request's functions; a call of any other function is no call.
        eager: If true, a call begins as soon as its name is known and its arguments begin. Streams need this, and
            cannot take the call back then. If false, a call begins when it is complete.
        schemas: The schemas of the functions' arguments by the functions' names, for formats that write texts without
            quotes.
    """

    def __init__(
        self,
        offered: Collection[str],
        *,
        eager: bool,
        new_id: NewId = openai_id,
        schemas: Mapping[str, dict[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.offered = frozenset(offered)
        self.eager = eager
        self.schemas = schemas
        self.count = 0
        self._new_id = new_id

    def start(self, name: str, call_id: str | None = None) -> CallStart:
        """Begins the next call of the answer. `call_id` is the id that the model wrote, if its format has one."""
        self.count += 1
        return CallStart(self.count - 1, call_id or self._new_id(name, self.count - 1), name)


class MarkerSearch:
    """Splits text at markers. Holds back a possible beginning of a marker, and blanks, which have no meaning before a
    marker."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._beginnings = frozenset(marker[:k] for marker in markers for k in range(1, len(marker)))
        self._longest = max(map(len, markers))
        self._held = ""
        self.dropped = ""  # Blanks before the last marker that was found.

    def push(self, text: str) -> tuple[str, str | None, str]:
        """Returns (text before the marker, the marker or None, text after it)."""
        buffer = self._held + text
        found = [(begin, marker) for marker in self._markers if (begin := buffer.find(marker)) >= 0]
        if found:
            begin, marker = min(found)
            self._held = ""
            before = buffer[:begin].rstrip(BLANKS)
            self.dropped = buffer[len(before) : begin]
            return before, marker, buffer[begin + len(marker) :]
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
