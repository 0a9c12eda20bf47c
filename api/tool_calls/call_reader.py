"""Reads one call as models write it: {"name": "f", "arguments": {…}}. Llama writes "parameters". Other members are
ignored."""

from __future__ import annotations

import json
from typing import Literal

from lorafleet.api.tool_calls.json_scanner import JsonScanner, Part
from lorafleet.api.tool_calls.parser import CallArguments, Calls, Event, Text

_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """The reader of one call. `raw` is its text so far. Two of the values of `status` are errors:

    - "broken": the text is no call.
    - "torn": the call has begun in a stream and then became invalid. The rest is passed on as its arguments, so that
      the client sees what the model wrote.

    Args:
        opening: Text before the call that belongs to it, such as its marker.
        name: Name of the function if it stands outside the JSON, which is then the arguments.
    """

    def __init__(self, calls: Calls, opening: str, name: str | None = None) -> None:
        self.status: Literal["open", "done", "broken", "torn"] = "open"
        self.raw = opening
        self._calls = calls
        self._scanner = JsonScanner()
        self._index: int | None = None  # set once the call has begun
        self._name = name
        self._bare = name is not None
        self._key = ""
        self._value = ""
        self._arguments = ""
        self._sent = 0  # characters of the arguments
        self._has_arguments = self._bare

    def push(self, text: str) -> tuple[list[Event], str]:
        """Returns the events, and the text after the call. That text includes the character that makes the call
        invalid."""
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
        """Passes on more text of a torn call as its arguments."""
        assert self._index is not None
        return [CallArguments(self._index, text)] if text else []

    def given_up(self) -> list[Event]:
        """Ends a call that is incomplete or invalid. Its text is shown unless the call has begun."""
        return [] if self._index is not None else [Text(self.raw)]

    def _take(self, part: Part, char: str) -> bool:
        """Returns whether the text may still be a call."""
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
