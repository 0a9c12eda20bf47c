"""Reads a call whose name stands before its arguments, which are JSON, with markers around both.

DeepSeek V3, V3.1 and Kimi K2 write calls so. Sources: the chat templates of these models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import regex

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.call_reader import CallReader
from lorafleet.api.tool_calls.json_scanner import BLANKS, MAX_BLANKS
from lorafleet.api.tool_calls.parser import Calls, Event, shown

MAX_NAME_CHARS = 256
_NAME = rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARS}}}"
_BLANKS = rf"\s{{0,{MAX_BLANKS}}}"


@dataclass(frozen=True, slots=True)
class NamedJson:
    before_name: str
    after_name: str
    after_json: str
    head: regex.Pattern[str]  # The text before the arguments, with the groups `name` and, in some formats, `id`.
    numbered: bool = False  # A number follows the name.

    def grammar(self, offer: Offer) -> str:
        """Returns the body of the rule `call`."""
        if not offer.rules:
            return '"{"'
        special = offer.special
        before = free_text.spelled(self.before_name, special)
        number = "/:[0-9]{1,6}/ " if self.numbered else ""
        after, end = free_text.spelled(self.after_name, special), free_text.spelled(self.after_json, special)
        return " | ".join(
            f"{before} {free_text.text(name)} {number}{after} BLANKS? {rule} BLANKS? {end}"
            for name, rule in offer.rules.items()
            if re.fullmatch(_NAME, name)
        )


def _head(before: str, after: str) -> regex.Pattern[str]:
    return regex.compile(rf"{re.escape(before)}{_BLANKS}(?P<name>{_NAME}){_BLANKS}{re.escape(after)}{_BLANKS}(?=\{{)")


DEEPSEEK_V3 = NamedJson(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",  # DeepSeek's markers have such bars.
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    _head("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "```json"),
)
DEEPSEEK_V31 = NamedJson(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    _head("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
)
KIMI_K2 = NamedJson(
    "<|tool_call_begin|>functions.",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    regex.compile(
        rf"<\|tool_call_begin\|>{_BLANKS}(?P<id>(?:functions\.)?(?P<name>{_NAME}):[0-9]{{1,6}}){_BLANKS}"
        rf"<\|tool_call_argument_begin\|>{_BLANKS}(?=\{{)"
    ),
    numbered=True,
)


def kimi_id(name: str, index: int) -> str:
    """Returns an id of Kimi's form, from which its template takes the function's name."""
    return f"functions.{name}:{index}"


class NamedJsonReader:
    def __init__(self, syntax: NamedJson, calls: Calls, opening: str) -> None:
        self._syntax = syntax
        self._calls = calls
        self._opening = opening
        self._begun = ""  # The text before the arguments, or after them.
        self._call: CallReader | None = None
        self._status: Literal["open", "done", "broken"] = "open"

    @property
    def status(self) -> Literal["open", "done", "broken", "torn"]:
        if self._call is not None and self._call.status in ("broken", "torn"):
            return self._call.status
        return self._status

    def push(self, text: str) -> tuple[list[Event], str]:
        if self._call is None:
            text = self._read_head(text)
            if self._call is None:
                return [], text
        events: list[Event] = []
        if self._call.status == "open":
            events, text = self._call.push(text)
        if self._call.status == "done" and text:
            text = self._read_end(text)
        return events, text

    def tear(self, text: str) -> list[Event]:
        assert self._call is not None
        return self._call.tear(text)

    def given_up(self) -> list[Event]:
        if self._call is None:
            return shown(self._opening + self._begun)
        return [] if self._call.status == "done" else self._call.given_up()

    def _read_head(self, text: str) -> str:
        self._begun += text
        found = self._syntax.head.match(self._begun, partial=True)
        if found is None or not found.partial:
            self._call, text = self._started(found)
            return text
        return ""

    def _started(self, found: regex.Match[str] | None) -> tuple[CallReader | None, str]:
        if found is None or found["name"] not in self._calls.offered:
            text, self._begun, self._status = self._begun, "", "broken"
            return None, text
        number = found.groupdict().get("id")
        opening, rest = self._opening + found[0], self._begun[found.end() :]
        self._begun = ""
        return CallReader(self._calls, opening, found["name"], number), rest

    def _read_end(self, text: str) -> str:
        """Skips the marker behind the arguments. A model that leaves it out has made the call all the same."""
        self._begun += text
        rest = self._begun.lstrip(BLANKS)
        end = self._syntax.after_json.lstrip(BLANKS)
        if end.startswith(rest) and rest != end:
            return ""
        self._status = "done"
        return rest.removeprefix(end)
