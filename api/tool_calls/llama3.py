"""Parses Llama 3's format: {"name": …, "parameters": {…}}, or several of them with ";" between them. They come after
<|python_tag|> or at the very beginning of the answer."""

from __future__ import annotations

from lorafleet.api.tool_calls.call_grammar import OBJECT, Offer
from lorafleet.api.tool_calls.call_reader import CallReader
from lorafleet.api.tool_calls.json_scanner import BLANKS
from lorafleet.api.tool_calls.parser import Calls, Event, MarkerSearch, last_words, shown

START = "<|python_tag|>"
BARE_START = '{"name"'  # beginning of a call without a marker, as the grammar allows it
_BETWEEN = BLANKS + ";"


def grammar(offer: Offer) -> str:
    more = '(BLANKS? ";" BLANKS? call)*' if offer.parallel else ""
    return f"{offer.answer(START, bare=OBJECT)}calls: BLANKS? call {more}\n{offer.call('parameters')}"


class Llama3Parser:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._outside = MarkerSearch(START)
        self._call: CallReader | None = None
        self._gap: str | None = ""  # text before a possible call without a marker; None: no such call can begin

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._call is not None:
                more, text = self._read(self._call, text)
            elif self._gap is not None:
                more, text = self._cross(self._gap + text)
            else:
                more, text = self._search(text)
            events += more
        return events

    def finish(self) -> list[Event]:
        if self._call is not None:
            return self._call.given_up()
        return last_words((self._gap or "") + self._outside.flush(), self._calls)

    def _cross(self, text: str) -> tuple[list[Event], str]:
        rest = text.lstrip(_BETWEEN if self._calls.count else BLANKS)
        gap = text[: len(text) - len(rest)]
        if START.startswith(rest):
            self._gap = text
            return [], ""
        self._gap = None
        if rest.startswith("{"):
            self._call = CallReader(self._calls, gap)
            return [], rest
        return [], rest if rest.startswith(START) and self._calls.count else text

    def _search(self, text: str) -> tuple[list[Event], str]:
        before, marker, text = self._outside.push(text)
        if marker is not None:
            self._call = CallReader(self._calls, self._outside.dropped + START)
        return shown(before), text

    def _read(self, call: CallReader, text: str) -> tuple[list[Event], str]:
        if call.status == "torn":
            return call.tear(text), ""
        events, text = call.push(text)
        if call.status == "done":
            self._call, self._gap = None, ""
        elif call.status == "broken":
            self._call = None
            events += call.given_up()
        return events, text
