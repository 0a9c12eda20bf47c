"""Reads one call as models write it: {"name": "f", "arguments": {…}}. Llama writes "parameters". Other members are
ignored."""

from __future__ import annotations

import json
from typing import Literal

from lorafleet.api.tool_calls.json_scanner import JsonScanner, Part
from lorafleet.api.tool_calls.parser import CallArguments, Calls, Event, Text

_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """The reader of one call. Two of the values of `status` are errors:

    - "broken": the text is no call.
    - "torn": the call has begun in a stream and then became invalid. The rest is passed on as its arguments, so that
      the client sees what the model wrote.

    Texts are lists of pieces until they are needed, because adding each character to a text takes quadratic time.

    Args:
        opening: Text before the call that belongs to it, such as its marker.
        name: Name of the function if it stands outside the JSON, which is then the arguments.
        call_id: Id of the call if the model writes it.
    """

    def __init__(self, calls: Calls, opening: str, name: str | None = None, call_id: str | None = None) -> None:
        self.status: Literal["open", "done", "broken", "torn"] = "open"
        self._calls = calls
        self._scanner = JsonScanner()
        self._index: int | None = None  # set once the call has begun
        self._name = name
        self._id = call_id
        self._bare = name is not None
        self._raw = [opening]  # The text so far.
        self._key = ""  # The key of the current member, once it is complete.
        self._letters: list[str] = []  # The key while it is written, or the value of "name".
        self._arguments: list[str] = []  # The arguments that have not been given out.
        self._has_opened = False  # The arguments have begun.
        self._has_arguments = self._bare

    def push(self, text: str) -> tuple[list[Event], str]:
        """Returns the events, and the text after the call. That text includes the character that makes the call
        invalid."""
        for i, char in enumerate(text):
            part = self._scanner.step(char)
            if part is Part.BROKEN or not self._take(part, char):
                return self._failed(text[:i]), text[i:]
            if self._scanner.done:
                if self._name not in self._calls.offered or not self._has_arguments:
                    return self._failed(text[: i + 1]), text[i + 1 :]
                self.status = "done"
                return self._begun(), text[i + 1 :]
        self._raw.append(text)
        return self._begun(), ""

    def tear(self, text: str) -> list[Event]:
        """Passes on more text of a torn call as its arguments."""
        assert self._index is not None
        return [CallArguments(self._index, text)] if text else []

    def given_up(self) -> list[Event]:
        """Ends a call that is incomplete or invalid. Its text is shown unless the call has begun."""
        return [] if self._index is not None else [Text("".join(self._raw))]

    def _failed(self, text: str) -> list[Event]:
        """Ends an invalid call, whose last valid text is given. A stream shows what it shows of a call that came in
        single characters."""
        self._raw.append(text)
        events = self._begun()
        self.status = "broken" if self._index is None else "torn"
        return events

    def _take(self, part: Part, char: str) -> bool:
        """Returns whether the text may still be a call."""
        if self._bare:
            if self._has_opened or char == "{":
                self._has_opened = True
                self._arguments.append(char)
            return True
        if part is Part.KEY:
            self._letters.append(char)
            if self._scanner.key_ended:
                self._key, self._letters = json.loads("".join(self._letters)), []
                return not (self._key in _ARGUMENTS and self._has_arguments)
        elif part is Part.VALUE:
            return self._take_value(char)
        elif char == ",":
            self._letters = []
        return True

    def _take_value(self, char: str) -> bool:
        if self._key in _ARGUMENTS:
            if not self._has_opened and char != "{":
                return False
            self._has_arguments = self._has_opened = True
            self._arguments.append(char)
            return True
        if self._key == "name":
            self._letters.append(char)
            if self._scanner.value_ended:
                name = json.loads("".join(self._letters))
                self._name = name if self._name is None and isinstance(name, str) else None
                return self._name in self._calls.offered
        return True

    def _begun(self) -> list[Event]:
        ready = self.status == "done" or self._calls.eager
        if not ready or self._name is None or not self._arguments:
            return []
        events: list[Event] = []
        if self._index is None:
            start = self._calls.start(self._name, self._id)
            self._index = start.index
            events.append(start)
        events.append(CallArguments(self._index, "".join(self._arguments)))
        self._arguments = []
        return events
