"""Reads one call as models write it: {"name": "f", "arguments": {…}}, Llama says "parameters"; other members are
passed over."""

from __future__ import annotations

import json
from typing import Literal

from lorafleet.api.tool_calls.json_scanner import JsonScanner, Part
from lorafleet.api.tool_calls.parser import CallArguments, Calls, Event, Text

_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """status: "broken" is no call, and `raw` is the text of it so far; "torn" is one that has begun in a stream and
    then broke: what follows is passed on as its arguments, for the client to see what the model wrote.

    opening: text before it that belongs to the call, such as its marker. name: where it stands outside the JSON, which
    then is the arguments.
    """

    def __init__(self, calls: Calls, opening: str, name: str | None = None) -> None:
        self.status: Literal["open", "done", "broken", "torn"] = "open"
        self.raw = opening
        self._calls = calls
        self._scanner = JsonScanner()
        self._index: int | None = None  # once it has begun
        self._name = name
        self._bare = name is not None
        self._key = ""
        self._value = ""
        self._arguments = ""
        self._sent = 0  # characters of them
        self._has_arguments = self._bare

    def push(self, text: str) -> tuple[list[Event], str]:
        """Events, and the text behind the call. The character that breaks it is among that."""
        for i, char in enumerate(text):
            part = self._scanner.step(char)
            if part is Part.BROKEN or not self._take(part, char):
                self.status = "broken" if self._index is None else "torn"
                return self._begun(), text[i:]
            self.raw += char
            if self._scanner.done:
                complete = self._name in self._calls.offered and self._has_arguments
                self.status = "done" if complete else "broken"
                return self._begun(), text[i + 1 :]
        return self._begun(), ""

    def tear(self, text: str) -> list[Event]:
        """The rest of a torn one."""
        assert self._index is not None
        return [CallArguments(self._index, text)] if text else []

    def given_up(self) -> list[Event]:
        """Where the answer ends within the call, or it broke: it is text unless it has begun."""
        return [] if self._index is not None else [Text(self.raw)]

    def _take(self, part: Part, char: str) -> bool:
        """Whether it may still be a call."""
        if self._bare:
            self._arguments += char if self._arguments or char == "{" else ""
            return True
        if part is Part.KEY:
            self._key += char
            if self._scanner.key_ended:
                self._key = json.loads(self._key)
                self._value = ""
                return not (self._key in _ARGUMENTS and self._has_arguments)
        elif part is Part.VALUE:
            return self._take_value(char)
        elif char == ",":
            self._key = ""
        return True

    def _take_value(self, char: str) -> bool:
        if self._key in _ARGUMENTS:
            self._has_arguments = True
            self._arguments += char
            return self._arguments[0] == "{"
        self._value += char
        if self._key == "name" and self._scanner.value_ended:
            name = json.loads(self._value)
            self._name = name if self._name is None and isinstance(name, str) else None
            return self._name in self._calls.offered
        return True

    def _begun(self) -> list[Event]:
        ready = self.status == "done" or (self._calls.eager and self.status != "broken")
        if not ready or self._name is None or not self._arguments:
            return []
        events: list[Event] = []
        if self._index is None:
            start = self._calls.start(self._name)
            self._index = start.index
            events.append(start)
        if len(self._arguments) > self._sent:
            events.append(CallArguments(self._index, self._arguments[self._sent :]))
            self._sent = len(self._arguments)
        return events
