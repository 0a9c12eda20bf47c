"""Follows one JSON object strictly, character by character, and classifies each character.

Models write their calls as JSON, and clients get the arguments while they are written. So the text is checked as it
arrives, in one pass, and is not parsed again at each token.
"""

from __future__ import annotations

import re
from enum import Enum, auto

BLANKS = " \t\n\r"
_SCALAR_ENDS = frozenset(",]}" + BLANKS)
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSER = {"{": "}", "[": "]"}


class Part(Enum):
    BROKEN = auto()  # The text is no JSON object.
    KEY = auto()  # Key of a member of the outer object, including quotes.
    VALUE = auto()  # Value of such a member.
    OTHER = auto()  # Braces, colons, commas and blanks between members.


class _At(Enum):
    START = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    FIRST_VALUE = auto()  # First value of an array, which may also end here.
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    AFTER = auto()
    DONE = auto()


class JsonScanner:
    """The state of the scan.

    `key_ended` and `value_ended` mean that the last character completed a member's key or value. The end of a number
    or literal is known only from the character after it.
    """

    __slots__ = ("_at", "_hex_left", "_in_key", "_open", "_scalar", "key_ended", "value_ended")

    def __init__(self) -> None:
        self._at = _At.START
        self._open: list[str] = []
        self._in_key = False
        self._hex_left = 0
        self._scalar = ""
        self.key_ended = self.value_ended = False

    @property
    def done(self) -> bool:
        return self._at is _At.DONE

    def step(self, char: str) -> Part:
        depth, at, in_key = len(self._open), self._at, self._in_key
        if not self._step(char):
            return Part.BROKEN
        in_string = at in (_At.STRING, _At.ESCAPE, _At.HEX)
        self.key_ended = depth == 1 and in_key and in_string and self._at is _At.COLON
        self.value_ended = depth >= 1 and len(self._open) == 1 and self._at is _At.AFTER and not char.isspace()
        if depth == 1 and ((in_string and in_key) or (at in (_At.FIRST_KEY, _At.KEY) and char == '"')):
            return Part.KEY
        if depth > 1 or (in_string and not in_key):
            return Part.VALUE
        if depth == 1 and char not in BLANKS and (at is _At.VALUE or (at is _At.SCALAR and self._at is _At.SCALAR)):
            return Part.VALUE
        return Part.OTHER

    def _step(self, char: str) -> bool:
        at = self._at
        if at is _At.STRING:
            return self._in_string(char)
        if at is _At.ESCAPE:
            self._at, self._hex_left = (_At.HEX, 4) if char == "u" else (_At.STRING, 0)
            return char in '"\\/bfnrtu'
        if at is _At.HEX:
            self._hex_left -= 1
            if not self._hex_left:
                self._at = _At.STRING
            return char in "0123456789abcdefABCDEF"
        if at is _At.SCALAR:
            if char not in _SCALAR_ENDS:
                self._scalar += char
                return True
            if not _SCALAR.fullmatch(self._scalar):
                return False
            self._at = _At.AFTER
        return char in BLANKS or self._between(char)

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self._at = _At.COLON if self._in_key else _At.AFTER
        elif char == "\\":
            self._at = _At.ESCAPE
        return char >= " "

    def _between(self, char: str) -> bool:
        """Processes a character that is not blank and is outside of strings."""
        at = self._at
        if at is _At.START:
            return char == "{" and self._enter(char)
        if at is _At.COLON:
            self._at = _At.VALUE
            return char == ":"
        if at in (_At.FIRST_KEY, _At.KEY):
            if char == "}":
                return at is _At.FIRST_KEY and self._leave(char)
            self._at, self._in_key = _At.STRING, True
            return char == '"'
        if at in (_At.VALUE, _At.FIRST_VALUE):
            if char == "]":
                return at is _At.FIRST_VALUE and self._leave(char)
            return self._begin_value(char)
        if at is _At.AFTER:
            if char == ",":
                self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
                return True
            return self._leave(char)
        return False

    def _begin_value(self, char: str) -> bool:
        if char in _CLOSER:
            return self._enter(char)
        self._in_key = False
        if char == '"':
            self._at = _At.STRING
        else:
            self._at, self._scalar = _At.SCALAR, char
        return char in '"-0123456789tfn'

    def _enter(self, char: str) -> bool:
        self._open.append(char)
        self._at = _At.FIRST_KEY if char == "{" else _At.FIRST_VALUE
        return True

    def _leave(self, char: str) -> bool:
        if char != _CLOSER[self._open[-1]]:
            return False
        self._open.pop()
        self._at = _At.AFTER if self._open else _At.DONE
        return True
