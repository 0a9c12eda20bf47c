"""Reads an array of calls: [{"name": …, "arguments": {…}}, …], or calls of another notation in such brackets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from lorafleet.api.tool_calls.call_reader import CallReader
from lorafleet.api.tool_calls.json_scanner import BLANKS
from lorafleet.api.tool_calls.parser import Calls, Event, shown


class OneCallReader(Protocol):
    """The reader of one call, as CallReader."""

    @property
    def status(self) -> Literal["open", "done", "broken", "torn"]: ...

    def push(self, text: str) -> tuple[list[Event], str]: ...

    def tear(self, text: str) -> list[Event]: ...

    def given_up(self) -> list[Event]: ...


class CallArray:
    """An array of calls in an answer. If it is invalid, the text from the invalid place on is shown.

    Args:
        opening: The text up to and including its "[".
        new_call: Makes the reader of a call from the text before it.
        begins: Returns whether a call may begin with the character.
    """

    def __init__(
        self,
        calls: Calls,
        opening: str,
        new_call: Callable[[Calls, str], OneCallReader] = CallReader,
        begins: Callable[[str], bool] = "{".__eq__,
    ) -> None:
        self.status: Literal["open", "done", "broken"] = "open"
        self._calls = calls
        self._gap = opening  # text since the last call
        self._expects_call = True
        self._call: OneCallReader | None = None
        self._new_call = new_call
        self._begins = begins

    def push(self, text: str) -> tuple[list[Event], str]:
        """Returns the events, and the text after the array."""
        events: list[Event] = []
        while text and self.status == "open":
            if self._call is None:
                more, text = self._between(text)
            else:
                more, text = self._read(self._call, text)
            events += more
        return events, text

    def finish(self) -> list[Event]:
        return shown(self._gap) if self._call is None else self._call.given_up()

    def _between(self, text: str) -> tuple[list[Event], str]:
        rest = text.lstrip(BLANKS)
        self._gap += text[: len(text) - len(rest)]
        if not rest:
            return [], ""
        if self._begins(rest[0]) and self._expects_call:
            self._call, self._expects_call = self._new_call(self._calls, self._gap), False
            return [], rest
        if rest[0] == "," and not self._expects_call:
            self._gap, self._expects_call = self._gap + ",", True
            return [], rest[1:]
        if rest[0] == "]" and not self._expects_call:
            self.status = "done"
            return [], rest[1:]
        self.status = "broken"
        return shown(self._gap), rest

    def _read(self, call: OneCallReader, text: str) -> tuple[list[Event], str]:
        if call.status == "torn":
            return call.tear(text), ""
        events, text = call.push(text)
        if call.status == "done":
            self._call, self._gap = None, ""
        elif call.status == "broken":
            self.status = "broken"
            events += call.given_up()
        return events, text
