"""Parses Mistral's formats after [TOOL_CALLS]: an array [{"name": …, "arguments": {…}}, …]. From tokenizer v11 on the
format is name[CALL_ID]…[ARGS]{…}, where [CALL_ID] and [ARGS] may be missing, and each call has a marker of its own."""

from __future__ import annotations

import re
import secrets
import string

import regex

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_array import CallArray
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.call_reader import CallReader
from lorafleet.api.tool_calls.json_scanner import BLANKS, MAX_BLANKS
from lorafleet.api.tool_calls.parser import Calls, Event, MarkerSearch, last_words, shown

START, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = r"[A-Za-z0-9_.\-]{1,256}"
# All parts are bounded, since the text is matched again whenever more of it arrives.
_BEHIND = rf"\s{{0,{MAX_BLANKS}}}(?:\[CALL_ID\]\w{{0,64}}\s{{0,{MAX_BLANKS}}})?(?:\[ARGS\]\s{{0,{MAX_BLANKS}}})?"
_HEAD = re.compile(rf"({_NAME}){_BEHIND}(?=\{{)")
_HEAD_BEGUN = regex.compile(rf"(?:{_NAME})?{_BEHIND}")


def grammar(offer: Offer) -> str:
    more = '(BLANKS? "," BLANKS? call)*' if offer.parallel else ""
    behind = f"BLANKS? ({free_text.marker(ARGUMENTS, offer.special)} BLANKS?)?"
    named = [
        f"{free_text.text(name)} {behind} {rule}" for name, rule in offer.rules.items() if re.fullmatch(_NAME, name)
    ]
    return (
        f"{offer.answer(START)}calls: BLANKS? ({' | '.join(['array', *named])})\n"
        f'array: "[" BLANKS? call {more} BLANKS? "]"\n{offer.call("arguments")}'
    )


def mistral_id(_name: str, _index: int) -> str:
    """Returns a call id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralParser:
    """The parser of Mistral's formats; `calls` must use mistral_id."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._outside = MarkerSearch(START)
        self._head: str | None = None  # text since a marker, until it decides the format
        self._marker = ""  # the last marker and the blanks before it
        self._inside: CallArray | CallReader | None = None

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._inside is not None:
                more, text = self._read(self._inside, text)
            elif self._head is not None:
                more, text = self._begin(self._head + text)
            else:
                before, marker, text = self._outside.push(text)
                more = shown(before)
                if marker is not None:
                    self._head, self._marker = "", self._outside.dropped + marker
            events += more
        return events

    def finish(self) -> list[Event]:
        if isinstance(self._inside, CallArray):
            return self._inside.finish()
        if self._inside is not None:
            return self._inside.given_up()
        if self._head is not None:
            return shown(self._marker + self._head)
        return last_words(self._outside.flush(), self._calls)

    def _begin(self, head: str) -> tuple[list[Event], str]:
        rest = head.lstrip(BLANKS)
        opening = self._marker + head[: len(head) - len(rest)]
        named = _HEAD.match(rest)
        self._head = None
        if rest.startswith("["):
            self._inside = CallArray(self._calls, opening + "[")
            return [], rest[1:]
        if named is not None:
            self._inside = CallReader(self._calls, opening + named[0], named[1])
            return [], rest[named.end() :]
        if _HEAD_BEGUN.fullmatch(rest, partial=True):
            self._head = head
            return [], ""
        return shown(self._marker), head

    def _read(self, inside: CallArray | CallReader, text: str) -> tuple[list[Event], str]:
        if isinstance(inside, CallReader) and inside.status == "torn":
            return inside.tear(text), ""
        events, text = inside.push(text)
        if inside.status in ("done", "broken"):
            self._inside = None
            if isinstance(inside, CallReader) and inside.status == "broken":
                events += inside.given_up()
        return events, text
