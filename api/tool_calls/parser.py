"""What a parser of tool calls is: a model's text goes in as it comes, text and calls come out.

One file has one format: hermes.py, llama3.py, mistral.py; forced.py has what the server itself asks the model to write.
A text that begins as a call and is none is shown as text. What could be the beginning of a marker is held back until it
is known, so half of one is never shown.
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
    """index: of the call among those of one answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, JSON as the model wrote it."""

    index: int
    text: str


Event = Text | CallStart | CallArguments


class ToolCallParser(Protocol):
    """Of one answer."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What is left when the answer has ended."""
        ...


def openai_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


class Calls:
    """The calls of one answer so far.

    offered: names of the request's functions; a call of another one is no call. eager: a call begins as soon as its
    name is known and its arguments begin, for streams, which then cannot take it back; else when it is complete.
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
    """Divides text at markers. Holds back what may be a marker's beginning, and blanks, which before a marker mean
    nothing."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._beginnings = frozenset(marker[:k] for marker in markers for k in range(1, len(marker)))
        self._longest = max(map(len, markers))
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None, str]:
        """(text before, the marker that was found, text behind it)."""
        buffer = self._held + text
        found = [(at, marker) for marker in self._markers if (at := buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._held = ""
            return buffer[:at].rstrip(BLANKS), marker, buffer[at + len(marker) :]
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
    """Blanks behind calls mean nothing."""
    return shown(text) if text.strip(BLANKS) or not calls.count else []
