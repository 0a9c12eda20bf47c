"""Reads calls whose arguments are in another notation than JSON.

Llama 4, LFM2 and OLMo 3 write Python's notation, and Gemma 4 has one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import regex

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_array import CallArray
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.call_writer import CallWriter
from lorafleet.api.tool_calls.json_scanner import MAX_BLANKS
from lorafleet.api.tool_calls.literals import GEMMA, PYTHON, LiteralScanner, Notation
from lorafleet.api.tool_calls.parameter_grammar import ParameterSyntax, parameter_rules
from lorafleet.api.tool_calls.parser import Calls, Event

_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_.\-]{0,255})"
_BLANKS = rf"\s{{0,{MAX_BLANKS}}}"


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    before_name: str
    notation: Notation
    head: regex.Pattern[str]  # The text before the arguments, with the group `name`.

    def grammar(self, offer: Offer, rule: str) -> str:
        """Returns grammar rules of one call; `rule` is the first one's name."""
        notation = self.notation
        syntax = ParameterSyntax(
            "",
            notation.colon,
            before_text=notation.plain_quote,
            after_text=notation.plain_quote or None,
            more=",",
        )
        called, rules = list[str](), ""
        for i, (name, schema) in enumerate(offer.arguments.items()):
            if regex.fullmatch(_NAME, name):
                rules += parameter_rules(f"parameters_{i}", name, schema, syntax, offer)
                head, end = free_text.text(self.before_name + name + notation.opening), free_text.text(notation.closing)
                called.append(f"{head} BLANKS? parameters_{i} BLANKS? {end}")
        body = " | ".join(called or ['"-"'])
        return f"{rule}: {body}\n{rules}"


PYTHON_CALL = LiteralSyntax("", PYTHON, regex.compile(rf"{_NAME}{_BLANKS}(?=\()"))
GEMMA_CALL = LiteralSyntax("call:", GEMMA, regex.compile(rf"call:{_BLANKS}{_NAME}{_BLANKS}(?=\{{)"))


class LiteralCallReader:
    """The reader of one call, with the interface of CallReader."""

    def __init__(self, syntax: LiteralSyntax, calls: Calls, opening: str) -> None:
        self.status: Literal["open", "done", "broken", "torn"] = "open"
        self._syntax = syntax
        self._writer = CallWriter(calls, opening)
        self._scanner = LiteralScanner(syntax.notation)
        self._head: str | None = ""

    def push(self, text: str) -> tuple[list[Event], str]:
        if self._head is not None:
            self._head += text
            found = self._syntax.head.match(self._head, partial=True)
            if found is not None and found.partial:
                return [], ""
            text, self._head = self._head, None
            if found is None or not self._writer.begin(found["name"]):
                self.status = "broken"
                return [], text
            self._writer.read(found[0])
            text = text[found.end() :]
        for i, char in enumerate(text):
            written = self._scanner.step(char)
            if written is None:
                return self._failed(text[:i]), text[i:]
            self._writer.write(written)
            if self._scanner.done:
                self.status = "done"
                return self._writer.events(is_complete=True), text[i + 1 :]
        self._writer.read(text)
        return self._writer.events(), ""

    def tear(self, text: str) -> list[Event]:
        return self._writer.tear(text)

    def given_up(self) -> list[Event]:
        self._writer.read(self._head or "")
        self._writer.write("" if self.status != "open" else self._scanner.undecided)
        return self._writer.events() + self._writer.given_up()

    def _failed(self, text: str) -> list[Event]:
        """Ends an invalid call, whose last valid text is given."""
        self._writer.read(text)
        self._writer.write(self._scanner.undecided)
        events = self._writer.events()
        self.status = self._writer.failure()
        return events


def python_list(calls: Calls, opening: str) -> CallArray:
    """Returns the reader of [f(a=1), g()]."""
    return CallArray(
        calls,
        opening,
        new_call=lambda calls, opening: LiteralCallReader(PYTHON_CALL, calls, opening),
        begins=lambda char: char.isalpha() or char == "_",
    )


def python_list_grammar(offer: Offer) -> str:
    """Returns the body of the rule `call` for such a list, and the rules that it uses."""
    more = '(BLANKS? "," BLANKS? python_call)*' if offer.parallel else ""
    return f'"[" BLANKS? python_call {more} BLANKS? "]"\n{PYTHON_CALL.grammar(offer, "python_call")}'


def gemma_grammar(offer: Offer) -> str:
    return f"gemma_call\n{GEMMA_CALL.grammar(offer, 'gemma_call')}"


def python_lines_grammar(offer: Offer) -> str:
    return f"python_call\n{PYTHON_CALL.grammar(offer, 'python_call')}"
