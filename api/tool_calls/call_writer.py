"""Gives out one call whose arguments a reader converts to JSON from the notation of the model."""

from __future__ import annotations

from typing import Literal

from lorafleet.api.tool_calls.parser import CallArguments, Calls, CallStart, Event, shown


class CallWriter:
    """The events of one call.

    Args:
        opening: Text before the call that belongs to it, such as its marker.
    """

    def __init__(self, calls: Calls, opening: str) -> None:
        self._raw = [opening]  # The call's text as the model wrote it.
        self.name = ""
        self._calls = calls
        self._index: int | None = None
        self._pending: list[str] = []  # JSON that has not been given out.

    def begin(self, name: str) -> bool:
        """Sets the function's name. Returns whether the request offers this function."""
        self.name = name
        return name in self._calls.offered

    def write(self, json_text: str) -> None:
        if json_text:
            self._pending.append(json_text)

    def read(self, text: str) -> None:
        """Records the next text of the call as the model wrote it."""
        self._raw.append(text)

    def events(self, *, is_complete: bool = False) -> list[Event]:
        """Returns the new events. A stream has them as soon as there are any, else they come with the whole call."""
        if not self._pending or not (is_complete or self._calls.eager):
            return []
        events: list[CallStart | CallArguments] = []
        if self._index is None:
            start = self._calls.start(self.name)
            self._index = start.index
            events.append(start)
        events.append(CallArguments(self._index, "".join(self._pending)))
        self._pending = []
        return [*events]

    def failure(self) -> Literal["broken", "torn"]:
        """Returns the status of a reader that found the call invalid (call_reader.py)."""
        return "broken" if self._index is None else "torn"

    def tear(self, text: str) -> list[Event]:
        """Passes on more text of a torn call as its arguments."""
        assert self._index is not None
        return [CallArguments(self._index, text)] if text else []

    def given_up(self) -> list[Event]:
        """Ends a call that is incomplete or invalid. Its text is shown unless the call has begun."""
        return [] if self._index is not None else shown("".join(self._raw))
