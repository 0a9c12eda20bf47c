"""Converts one object from another notation to JSON, character by character, as a stream of text arrives.

The notations are Python's calls, f(a=1, b=['x', None]), and Gemma's objects, {a:<|"|>text<|"|>,b:[1]}. Both are read so
liberally that JSON is valid in them too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

from lorafleet.api.tool_calls.json_scanner import BLANKS

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD_CHARS = re.compile(r"[A-Za-z0-9_.+\-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_SAME = "\\'\"/"  # Characters that stand for themselves after a backslash.
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_WORD_CHARS = 256  # Longer words are no number, no constant and no name.


@dataclass(frozen=True, slots=True)
class Notation:
    opening: str  # Opens the outer object.
    closing: str
    colon: str  # Stands between the names and the values of the outer object.
    quotes: tuple[str, ...]
    plain_quote: str = ""  # One of the quotes; a text between two of them has no escapes.
    bare_inner_keys: bool = False  # Names in inner objects need no quotes.


PYTHON = Notation("(", ")", "=", ("'", '"'))
GEMMA = Notation("{", "}", ":", ('<|"|>', '"'), plain_quote='<|"|>', bare_inner_keys=True)


class _Place(Enum):
    START = auto()
    KEY = auto()
    BARE_KEY = auto()
    COLON = auto()
    VALUE = auto()
    QUOTE = auto()  # A quote of several characters has begun.
    TEXT = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    AFTER = auto()
    DONE = auto()


class LiteralScanner:
    """The state of the conversion. A comma may follow the last item."""

    def __init__(self, notation: Notation) -> None:
        self._notation = notation
        self._place = _Place.START
        self._open: list[str] = []  # "(" the outer object, "{" an inner one, "[" a list.
        self._is_first = True  # No item of the open object or list has come yet.
        self._is_key = False
        self._held = ""  # Characters of a quote, a word or an escape that is not complete.
        self._quote = ""
        self._num_hex = 0

    @property
    def done(self) -> bool:
        return self._place is _Place.DONE

    @property
    def undecided(self) -> str:
        """The last characters whose JSON has not been returned, as they were written."""
        return ("\\" if self._place in (_Place.ESCAPE, _Place.HEX) else "") + self._held

    def step(self, char: str) -> str | None:
        """Returns the JSON that the character completes, or None if the text is not in the notation.

        A character that is not in the notation is not among the undecided ones.
        """
        place = self._place
        if place is _Place.TEXT:
            return self._in_text(char)
        if place is _Place.ESCAPE:
            return self._escape(char)
        if place is _Place.HEX:
            return self._hex(char)
        if place is _Place.QUOTE:
            return self._in_quote(char)
        if place in (_Place.WORD, _Place.BARE_KEY):
            if _WORD_CHARS.fullmatch(char) and len(self._held) < MAX_WORD_CHARS:
                self._held += char
                return ""
            return self._end_word(char)
        return "" if char in BLANKS else self._between(char)

    def _between(self, char: str) -> str | None:
        place = self._place
        if place is _Place.START:
            return self._enter("(") if char == self._notation.opening else None
        if place is _Place.COLON:
            self._place = _Place.VALUE
            return ": " if char == self._colon else None
        if place is _Place.AFTER and char == ",":
            self._place = _Place.VALUE if self._open[-1] == "[" else _Place.KEY
            return ""
        if char == self._closer and (place is not _Place.VALUE or self._open[-1] == "["):
            return self._leave()
        if place is _Place.KEY:
            return self._begin_key(char)
        return self._begin_value(char) if place is _Place.VALUE else None

    @property
    def _colon(self) -> str:
        return self._notation.colon if self._open[-1] == "(" else ":"

    @property
    def _closer(self) -> str:
        return {"(": self._notation.closing, "{": "}", "[": "]"}[self._open[-1]]

    def _begin_key(self, char: str) -> str | None:
        self._is_key = True
        separator = self._separator()
        if any(quote[0] == char for quote in self._notation.quotes):
            if self._open[-1] == "(" and self._notation is PYTHON:
                return None
            return self._begin_quote(char, separator)
        if not (char.isalpha() or char == "_") or (self._open[-1] == "{" and not self._notation.bare_inner_keys):
            return None
        self._place, self._held = _Place.BARE_KEY, char
        return separator

    def _begin_value(self, char: str) -> str | None:
        self._is_key = False
        separator = self._separator() if self._open[-1] == "[" else ""
        if char in "{[":
            return separator + self._enter(char)
        if any(quote[0] == char for quote in self._notation.quotes):
            return self._begin_quote(char, separator)
        if not (char.isalnum() or char == "-"):
            return None
        self._place, self._held = _Place.WORD, char
        return separator

    def _separator(self) -> str:
        separator = "" if self._is_first else ", "
        self._is_first = False
        return separator

    def _begin_quote(self, char: str, separator: str) -> str:
        self._held, self._quote = char, next(quote for quote in self._notation.quotes if quote[0] == char)
        if len(self._quote) > 1:
            self._place = _Place.QUOTE
            return separator
        self._place, self._held = _Place.TEXT, ""
        return separator + '"'

    def _in_quote(self, char: str) -> str | None:
        if not self._quote.startswith(self._held + char):
            return None
        self._held += char
        if self._held == self._quote:
            self._place, self._held = _Place.TEXT, ""
            return '"'
        return ""

    def _in_text(self, char: str) -> str:
        if char == "\\" and self._quote != self._notation.plain_quote:
            self._place = _Place.ESCAPE
            return ""
        self._held += char
        text = ""
        while self._held and not self._quote.startswith(self._held):
            text, self._held = text + self._held[0], self._held[1:]
        if self._held != self._quote:
            return _json(text)
        self._held = ""
        self._place = _Place.COLON if self._is_key else _Place.AFTER
        return _json(text) + '"'

    def _escape(self, char: str) -> str:
        self._place = _Place.TEXT
        if char in _HEX_DIGITS:
            self._place, self._num_hex, self._held = _Place.HEX, _HEX_DIGITS[char], char
            return ""
        if char in _SAME:
            return _json(char)
        return _json(_ESCAPES.get(char, "\\" + char))

    def _hex(self, char: str) -> str | None:
        if char not in "0123456789abcdefABCDEF":
            return None
        digits = self._held[1:] + char
        if len(digits) < self._num_hex:
            self._held += char
            return ""
        code = int(digits, 16)
        if code > 0x10FFFF:
            return None
        self._place, self._held = _Place.TEXT, ""
        # Four digits may be half of a surrogate pair, and half of a pair cannot be encoded as UTF-8.
        is_half = self._num_hex == 4 or 0xD800 <= code < 0xE000
        return f"\\u{digits[-4:]}" if is_half else _json(chr(code))

    def _end_word(self, char: str) -> str | None:
        word = self._held
        if self._place is _Place.BARE_KEY:
            self._place, text = _Place.COLON, json.dumps(word)
        else:
            self._place = _Place.AFTER
            text = word if _NUMBER.fullmatch(word) else _WORDS.get(word, "")
        rest = "" if char in BLANKS else self._between(char)
        if not text or rest is None:
            return None
        self._held = ""
        return text + rest

    def _enter(self, kind: str) -> str:
        self._open.append(kind)
        self._is_first = True
        self._place = _Place.VALUE if kind == "[" else _Place.KEY
        return "[" if kind == "[" else "{"

    def _leave(self) -> str:
        kind = self._open.pop()
        self._is_first = False
        self._place = _Place.AFTER if self._open else _Place.DONE
        return "]" if kind == "[" else "}"


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
