"""Reads calls that have each parameter between tags: those of Qwen3-Coder, GLM 4.5, MiniMax M2 and Seed-OSS.

Texts stand there without quotes and escapes, so the function's schema decides what a value is: a text is taken as it
is written, and any other value is JSON. A text goes on until the tag that closes it; all other tags in it are text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import regex

from lorafleet.api.request import free_text
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.call_writer import CallWriter
from lorafleet.api.tool_calls.json_scanner import BLANKS, MAX_BLANKS
from lorafleet.api.tool_calls.parameter_grammar import ParameterSyntax, parameter_rules
from lorafleet.api.tool_calls.parameter_kinds import is_text, parameters_of
from lorafleet.api.tool_calls.parser import Calls, Event

_BLANKS = rf"\s{{0,{MAX_BLANKS}}}"
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Some models write values as in Python.


@dataclass(frozen=True, slots=True)
class XmlSyntax:
    """The tags of one format."""

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str
    end: str  # Ends the call.
    head: regex.Pattern[str]  # The text up to the name's end, with the group `name`.
    key: regex.Pattern[str]  # The text from a parameter's name to its value, with the group `key`.
    has_lines: bool  # A value is in lines of its own; a line break at its beginning and at its end is no part of it.

    def grammar(self, offer: Offer) -> str:
        """Returns the body of the rule `call`, and the rules that it uses."""
        syntax = ParameterSyntax(
            self.before_key,
            self.after_key,
            after_text=self.after_value,
            has_lines=self.has_lines,
            after_json=self.after_value,
        )

        called, rules = list[str](), ""
        for i, (name, schema) in enumerate(offer.arguments.items()):
            rules += parameter_rules(f"parameters_{i}", name, schema, syntax, offer)
            called.append(
                f"{offer.spelled(self.before_name)} {free_text.text(name)} {offer.spelled(self.after_name)} BLANKS? "
                f"parameters_{i} BLANKS? {offer.spelled(self.end)}"
            )
        return " | ".join(called or ['"<"']) + "\n" + rules


class XmlReader:
    def __init__(self, syntax: XmlSyntax, calls: Calls, opening: str) -> None:
        self.status: Literal["open", "done", "broken", "torn"] = "open"
        self._syntax = syntax
        self._writer = CallWriter(calls, opening)
        self._calls = calls
        self._left = ""  # Text that does not decide yet what it is.
        self._value: list[str] = []  # The value so far, if it is no text.
        self._place: Literal["head", "between", "text", "value"] = "head"
        self._schema: dict[str, Any] = {}
        self._num_parameters = 0
        self._is_wrong = False
        self._is_new = False  # The value has no text yet.

    def push(self, text: str) -> tuple[list[Event], str]:
        self._left += text
        while self.status == "open" and self._step():
            pass
        events = self._writer.events(is_complete=self.status == "done")
        if self._is_wrong:
            self.status = self._writer.failure()
        if self.status == "open":
            return events, ""
        rest, self._left = self._left, ""
        return events, rest

    def tear(self, text: str) -> list[Event]:
        return self._writer.tear(text)

    def given_up(self) -> list[Event]:
        if self.status == "open":
            left = self._take(len(self._left))
            if self._place == "text":
                self._writer.write(_escaped(left))
            elif self._place != "head":
                self._writer.write("".join(self._value) + left if self._place == "value" else left.strip(BLANKS))
        return self._writer.events() + self._writer.given_up()

    def _step(self) -> bool:
        """Reads one part of the call. Returns False if it needs more text."""
        if self._place == "text":
            return self._read_text()
        if self._place == "value":
            return self._read_value()
        return self._read_head() if self._place == "head" else self._read_between()

    def _read_head(self) -> bool:
        found = self._syntax.head.match(self._left, partial=True)
        if found is not None and found.partial:
            return False
        if found is None or not self._writer.begin(found["name"]):
            return self._fail()
        self._schema = self._calls.schemas.get(found["name"], {})
        self._take(found.end())
        self._writer.write("{")
        self._place = "between"
        return True

    def _read_between(self) -> bool:
        rest, end = self._left.lstrip(BLANKS), self._syntax.end
        if rest.startswith(end):
            self._take(len(self._left) - len(rest) + len(end))
            self._writer.write("}")
            self.status = "done"
            return False
        if end.startswith(rest):
            return False
        found = self._syntax.key.match(rest, partial=True)
        if found is not None and found.partial:
            return False
        if found is None:
            return self._fail()
        self._take(len(self._left) - len(rest) + found.end())
        known = parameters_of(self._schema)
        opens_text = found["key"] in known and is_text(known[found["key"]], self._schema)
        separator = ", " if self._num_parameters else ""
        self._writer.write(f"{separator}{json.dumps(found['key'], ensure_ascii=False)}: " + ('"' if opens_text else ""))
        self._num_parameters += 1
        self._place = "text" if opens_text else "value"
        self._is_new = True
        return True

    def _read_text(self) -> bool:
        """Passes on a text as it arrives, but for what may belong to the tag that closes it."""
        if self._is_new and self._syntax.has_lines and self._left:
            self._take(1 if self._left[0] == "\n" else 0)
        self._is_new = self._is_new and not self._left
        end = self._syntax.after_value
        begin = self._left.find(end)
        if begin >= 0:
            text = self._left[:begin]
            self._take(begin + len(end))
            self._writer.write(_escaped(self._trimmed(text)) + '"')
            self._place = "between"
            return True
        shown = _num_certain(self._left, end, has_lines=self._syntax.has_lines)
        self._writer.write(_escaped(self._take(shown)))
        return False

    def _read_value(self) -> bool:
        end = self._syntax.after_value
        begin = self._left.find(end)
        if begin < 0:
            self._value.append(self._take(_num_certain(self._left, end, has_lines=False)))
            return False
        value, self._value = "".join([*self._value, self._left[:begin]]), []
        self._writer.write(_json_of(value, has_lines=self._syntax.has_lines))
        self._take(begin + len(end))
        self._place = "between"
        return True

    def _trimmed(self, text: str) -> str:
        return text.removesuffix("\n") if self._syntax.has_lines else text

    def _take(self, num_chars: int) -> str:
        taken, self._left = self._left[:num_chars], self._left[num_chars:]
        self._writer.read(taken)
        return taken

    def _fail(self) -> bool:
        self._is_wrong = True
        return False


def _num_certain(text: str, end: str, *, has_lines: bool) -> int:
    """Returns the number of characters that cannot belong to the end of the value."""
    for closing in (["\n" + end] if has_lines else []) + [end]:
        for k in range(min(len(closing) - 1, len(text)), 0, -1):
            if closing.startswith(text[-k:]):
                return len(text) - k
    return len(text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, *, has_lines: bool) -> str:
    """Returns a value as JSON. A value that is no JSON is a text."""
    given = text.strip(BLANKS)
    if given in _WORDS:
        return _WORDS[given]
    try:
        json.loads(given, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text.removeprefix("\n").removesuffix("\n") if has_lines else text, ensure_ascii=False)
    return given


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _syntax(before_name: str, after_name: str, before_key: str, after_key: str, end: str) -> XmlSyntax:
    """Returns the syntax of tags that have names as attributes."""
    return XmlSyntax(
        before_name,
        after_name,
        before_key,
        after_key,
        "</parameter>",
        end,
        regex.compile(rf"{regex.escape(before_name)}(?P<name>[^<>\"\s]{{1,256}}){regex.escape(after_name)}"),
        regex.compile(rf"{regex.escape(before_key)}(?P<key>[^<>\"\s]{{1,256}}){regex.escape(after_key)}"),
        has_lines=after_key == ">",
    )


QWEN3_CODER = _syntax("<function=", ">", "<parameter=", ">", "</function>")
MINIMAX_M2 = _syntax('<invoke name="', '">', '<parameter name="', '">', "</invoke>")
GLM45 = XmlSyntax(
    "",
    "\n",
    "<arg_key>",
    "</arg_key>\n<arg_value>",
    "</arg_value>",
    "</tool_call>",
    regex.compile(rf"(?P<name>[^<>\"\s]{{1,256}}){_BLANKS}(?=<)"),
    regex.compile(rf"<arg_key>{_BLANKS}(?P<key>[^<>\"\s]{{1,256}}){_BLANKS}</arg_key>{_BLANKS}<arg_value>"),
    has_lines=False,
)
