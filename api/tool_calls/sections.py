"""Parses the formats in which a marker begins a section of calls and, in most of them, another one ends it.

A format is a Section; the reader of its calls is in a file of its own. Llama 4 may also begin an answer with calls
that have no marker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_array import CallArray, OneCallReader
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.json_scanner import BLANKS
from lorafleet.api.tool_calls.parser import Calls, Event, MarkerSearch, last_words, shown


@dataclass(frozen=True, slots=True)
class Section:
    start: str
    end: str  # "": the section ends with its first call or list of calls.
    new_reader: Callable[[Calls, str], OneCallReader]  # Its arguments: the calls, and text that belongs to the call.
    bare_start: str = ""  # If it begins an answer, a section without `start` and `end` begins there.

    def grammar(self, offer: Offer, call: str, bare: str = "") -> str:
        """Returns the grammar of answers, in which `call` is a call or a list of calls with its rule's body."""
        more = "(BLANKS? call)*" if offer.parallel and self.end else ""
        end = f"BLANKS? {free_text.marker(self.end, offer.special)}" if self.end else ""
        end = f"({end})?" if bare else end
        return f"{offer.answer(self.start, bare=bare)}calls: BLANKS? call {more} {end}\ncall: {call}\n"


class SectionParser:
    def __init__(self, section: Section, calls: Calls) -> None:
        self._section = section
        self._calls = calls
        self._outside = MarkerSearch(section.start)
        self._lead: str | None = "" if section.bare_start else None  # Blanks that begin the answer.
        self._gap: str | None = None  # Text in a section since its last call, or with its marker; None: outside.
        self._head = ""  # The section's marker and the blanks before it.
        self._has_called = False  # There was a call in this section.
        self._reader: OneCallReader | None = None
        self._torn: MarkerSearch | None = None

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._reader is not None:
                more, text = self._read(self._reader, text)
            elif self._gap is not None:
                more, text = self._between(self._gap, text)
            elif self._lead is not None:
                more, text = self._begin(self._lead + text)
            else:
                before, marker, text = self._outside.push(text)
                more = shown(before)
                if marker is not None:
                    self._gap = self._head = self._outside.dropped + marker
                    self._has_called = False
            events += more
        return events

    def finish(self) -> list[Event]:
        if self._reader is not None:
            if self._torn is not None:
                return self._reader.tear(self._torn.flush())
            return self._reader.given_up()
        if self._gap is not None:
            return [] if self._has_called else shown(self._gap)
        return last_words((self._lead or "") + self._outside.flush(), self._calls)

    def _begin(self, text: str) -> tuple[list[Event], str]:
        rest = text.lstrip(BLANKS)
        if not rest:
            self._lead = text
            return [], ""
        self._lead = None
        if rest.startswith(self._section.bare_start):
            self._reader = self._section.new_reader(self._calls, text[: len(text) - len(rest)])
            return [], rest
        return [], text

    def _between(self, gap: str, text: str) -> tuple[list[Event], str]:
        """Reads the text in a section before its first call, between calls, or after them."""
        end, head = self._section.end, "" if self._has_called else self._head
        whole = gap.removeprefix(head) + text
        rest = whole.lstrip(BLANKS)
        if not rest or (end and end.startswith(rest) and rest != end):
            self._gap = head + whole
            return [], ""
        self._gap = None
        if end and rest.startswith(end):
            return shown("" if self._has_called else head + whole[: len(whole) - len(rest)] + end), rest[len(end) :]
        self._reader = self._section.new_reader(self._calls, head + whole[: len(whole) - len(rest)])
        return [], rest

    def _read(self, reader: OneCallReader, text: str) -> tuple[list[Event], str]:
        if self._torn is not None:
            before, marker, text = self._torn.push(text)
            if marker is not None:
                self._reader = self._torn = None
            return reader.tear(before), text
        events, text = reader.push(text)
        if reader.status == "torn":
            self._torn = MarkerSearch(self._section.end or self._section.start)
        elif reader.status == "done":
            self._reader, self._has_called = None, True
            self._gap = "" if self._section.end else None
        elif reader.status == "broken":
            self._reader = None
            events += reader.given_up()
        return events, text


class ArrayReader:
    """Reads an array of calls as a section.

    Args:
        calls_in: Makes the reader of the array from the text up to and including its "[".
    """

    def __init__(self, opening: str, calls_in: Callable[[str], CallArray]) -> None:
        self._raw = opening
        self._calls_in = calls_in
        self._array: CallArray | None = None
        self._is_wrong = False

    @property
    def status(self) -> Literal["open", "done", "broken"]:
        if self._array is None:
            return "broken" if self._is_wrong else "open"
        return self._array.status

    def push(self, text: str) -> tuple[list[Event], str]:
        if self._array is None:
            if text[0] != "[":
                self._is_wrong = True
                return [], text
            self._array, text = self._calls_in(self._raw + "["), text[1:]
        return self._array.push(text)

    def tear(self, text: str) -> list[Event]:  # noqa: ARG002  # CallArray never lets its reader be torn.
        raise AssertionError("an array passes on the text of a torn call by itself")

    def given_up(self) -> list[Event]:
        if self._array is None:
            return shown(self._raw)
        return self._array.finish() if self._array.status == "open" else []
