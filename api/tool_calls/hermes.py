"""Parses the format of Qwen and Hermes: any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>, also
after text."""

from __future__ import annotations

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.call_reader import CallReader
from lorafleet.api.tool_calls.json_scanner import BLANKS
from lorafleet.api.tool_calls.parser import Calls, Event, MarkerSearch, last_words, shown

START, END = "<tool_call>", "</tool_call>"


def grammar(offer: Offer) -> str:
    end = free_text.marker(END, offer.special)
    return f"{offer.answer(START)}calls: BLANKS? call BLANKS? {end}\n{offer.call('arguments')}"


class HermesParser:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._outside = MarkerSearch(START, END)
        self._call: CallReader | None = None
        self._behind_call = False  # only blanks have arrived since
        self._torn: MarkerSearch | None = None

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._call is None:
                more, text = self._search(text)
            elif self._torn is not None:
                more, text = self._tear(self._call, self._torn, text)
            else:
                more, text = self._read(self._call, text)
            events += more
        return events

    def finish(self) -> list[Event]:
        if self._torn is not None and self._call is not None:
            return self._call.tear(self._torn.flush())
        if self._call is not None:
            return self._call.given_up()
        return last_words(self._outside.flush(), self._calls)

    def _search(self, text: str) -> tuple[list[Event], str]:
        before, marker, text = self._outside.push(text)
        if before.strip(BLANKS):
            closes = False
        else:
            closes, before = marker == END and self._behind_call, "" if self._behind_call else before
        if marker == START:
            self._call = CallReader(self._calls, self._outside.dropped + START)
        elif marker == END and not closes:
            before += self._outside.dropped + END
        self._behind_call = self._behind_call and not before and marker is None
        return shown(before), text

    def _read(self, call: CallReader, text: str) -> tuple[list[Event], str]:
        events, text = call.push(text)
        if call.status == "torn":
            self._torn = MarkerSearch(END)
        elif call.status != "open":
            self._call = None
            self._behind_call = call.status == "done"
            events += call.given_up() if call.status == "broken" else []
        return events, text

    def _tear(self, call: CallReader, search: MarkerSearch, text: str) -> tuple[list[Event], str]:
        before, marker, text = search.push(text)
        if marker is not None:
            self._call = self._torn = None
        return call.tear(before), text
