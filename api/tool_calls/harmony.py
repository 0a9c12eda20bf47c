"""Parses Harmony, the format of gpt-oss. An answer has several messages, and each has a channel:

- `analysis` is reasoning,
- `final` is the text,
- `commentary` is text too, unless it is addressed to a function: then it is a call.

A message is <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>, and the
prompt has the first <|start|>assistant. Source: github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from typing import Literal

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.call_reader import CallReader
from lorafleet.api.tool_calls.json_scanner import BLANKS
from lorafleet.api.tool_calls.parser import Calls, Event, MarkerSearch, Reasoning, last_words, shown
from lorafleet.protocol.errors import InvalidRequest

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (CHANNEL, MESSAGE, START, END, CONSTRAIN, RETURN, CALL)
_OPENING = "<|"  # Every marker begins with it. Excluding each marker by itself would take a large automaton.
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_ADDRESS = "to="
MAX_HEADER_CHARS = 512  # Longer text without <|message|> is no header.

_Place = Literal["start", "header", "reasoning", "text", "call", "between"]


def grammar(offer: Offer) -> str:
    """Returns the grammar of whole answers. Texts in it do not contain "<|".

    Raises InvalidRequest if the tokenizer lacks the special tokens.
    """
    missing = [name for name in MARKERS if name not in offer.special]
    if missing:
        raise InvalidRequest(
            f"This model writes Harmony, but its tokenizer has no special token {missing[0]}, so strict functions and "
            "JSON formats are not possible. Leave out `strict` and `response_format`.",
            "tools",
        )
    markers = {name: free_text.marker(name, offer.special) for name in MARKERS}
    channel, message, next_one = markers[CHANNEL], markers[MESSAGE], f'{markers[START]} "assistant"'
    typed = f'(" "? {markers[CONSTRAIN]} "json")?'
    called = []
    for name, rule in offer.rules.items():
        address = f" {_ADDRESS}functions.{name}"
        called.append(f"{channel} {free_text.text('commentary' + address)} {typed} {message} {rule}")
        called.append(f'{free_text.text(address)} {channel} "commentary" {typed} {message} {rule}')
    answer, channels = "TEXT", '("analysis" | "commentary")'
    if offer.text is not None:  # Commentary is content too.
        answer, channels = "formatted", '"analysis"'
    last = " | ".join([f'{channel} "final" {message} {answer}', *called])
    return (
        f"start: thought* ({last})\n"
        f"thought: {channel} {channels} {message} TEXT {markers[END]} {next_one}\n"
        f"TEXT: {free_text.free([_OPENING])}\n"
    )


class HarmonyParser:
    """An answer that has no channels is shown as text. An unfinished header at the end of an answer is not shown."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._search = MarkerSearch(*MARKERS)
        self._place: _Place = "start"
        self._header = ""
        self._call: CallReader | None = None
        self._has_text = False  # Text has come behind the call.

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._call is not None and self._call.status != "done":
                more, text = self._read(self._call, text)  # A marker in a string of the arguments is not one.
                events += more
                continue
            before, marker, text = self._search.push(text)
            events += self._take(before)
            if marker is not None:
                events += self._mark(marker)
        return events

    def finish(self) -> list[Event]:
        rest = self._search.flush()
        if self._place == "start":
            return shown(self._header + rest)
        if self._place == "text":
            return last_words(rest, self._calls)
        return [*self._take(rest), *self._close()]

    def _take(self, text: str) -> list[Event]:
        """Reads text without markers."""
        if not text:
            return []
        if self._place == "start":
            self._header += text
            begun = self._header.lstrip(BLANKS)
            if _ADDRESS.startswith(begun[: len(_ADDRESS)]) and len(begun) <= MAX_HEADER_CHARS:
                return []
            self._place, text, self._header = "text", self._header, ""
        elif self._place == "header":
            self._header += text
            if len(self._header) <= MAX_HEADER_CHARS:
                return []
            self._place, text = "text", self._header
        if self._place == "reasoning":
            return [Reasoning(text)]
        if self._call is not None and not self._has_text:
            text = text.lstrip(BLANKS)
            self._has_text = bool(text)
        return shown(text)

    def _read(self, call: CallReader, text: str) -> tuple[list[Event], str]:
        if call.status == "torn":
            return call.tear(text), ""
        events, text = call.push(text)
        if call.status == "broken":
            self._call, self._place = None, "text"
            events += call.given_up()
        return events, text

    def _mark(self, marker: str) -> list[Event]:
        if marker == MESSAGE and self._place in ("start", "header"):
            self._open()
            return []
        if marker in (CHANNEL, CONSTRAIN) and self._place in ("start", "header"):
            self._place, self._header = "header", self._header + marker
            return []
        events = self._close()
        if marker in (START, CHANNEL):
            self._place, self._header = "header", "" if marker == START else marker
        return events

    def _open(self) -> None:
        """Begins the message whose header is complete."""
        channel, recipient = (
            _CHANNEL.search(self._header),
            _RECIPIENT.search(self._header.replace(CHANNEL, " " + CHANNEL)),
        )
        name = None if recipient is None else recipient[1]
        if name in self._calls.offered:
            self._place, self._has_text = "call", False
            self._call = CallReader(self._calls, self._header + MESSAGE, name)
        else:
            self._place = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        self._header = ""

    def _close(self) -> list[Event]:
        """Ends the open message. An incomplete call that has not begun yet is shown as text."""
        call, self._call, self._place, self._header = self._call, None, "between", ""
        return call.given_up() if call is not None and call.status == "open" else []
