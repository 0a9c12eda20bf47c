"""Follows one JSON object strictly, character by character, and classifies each character.

Models write their calls as JSON, and clients get the arguments while they are written. So the text is checked as it
arrives, in one pass, and is not parsed again at each token.
"""

from __future__ import annotations

import re
from enum import Enum, auto

BLANKS = " \t\n\r"
MAX_BLANKS = 64  # Most blanks between the parts of a call that a pattern matches, as in the grammars.
_SCALAR_ENDS = frozenset(",]}" + BLANKS)
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSER = {"{": "}", "[": "]"}


class Part(Enum):
    BROKEN = auto()  # The text is no JSON object.
    KEY = auto()  # Key of a member of the outer object, including quotes.
    VALUE = auto()  # Value of such a member.
    OTHER = auto()  # Braces, colons, commas and blanks between members.


class _Place(Enum):
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

    __slots__ = ("_hex_left", "_in_key", "_open", "_place", "_scalar", "key_ended", "value_ended")

    def __init__(self) -> None:
        self._place = _Place.START
        self._open: list[str] = []
        self._in_key = False
        self._hex_left = 0
        self._scalar: list[str] = []
        self.key_ended = self.value_ended = False

    @property
    def done(self) -> bool:
        return self._place is _Place.DONE

    def step(self, char: str) -> Part:
        depth, place, in_key = len(self._open), self._place, self._in_key
        if not self._step(char):
            return Part.BROKEN
        in_string = place in (_Place.STRING, _Place.ESCAPE, _Place.HEX)
        self.key_ended = depth == 1 and in_key and in_string and self._place is _Place.COLON
        self.value_ended = depth >= 1 and len(self._open) == 1 and self._place is _Place.AFTER and not char.isspace()
        if depth == 1 and ((in_string and in_key) or (place in (_Place.FIRST_KEY, _Place.KEY) and char == '"')):
            return Part.KEY
        if depth > 1 or (in_string and not in_key):
            return Part.VALUE
        if (
            depth == 1
            and char not in BLANKS
            and (place is _Place.VALUE or (place is _Place.SCALAR and self._place is _Place.SCALAR))
        ):
            return Part.VALUE
        return Part.OTHER

    def _step(self, char: str) -> bool:
        place = self._place
        if place is _Place.STRING:
            return self._in_string(char)
        if place is _Place.ESCAPE:
            self._place, self._hex_left = (_Place.HEX, 4) if char == "u" else (_Place.STRING, 0)
            return char in '"\\/bfnrtu'
        if place is _Place.HEX:
            self._hex_left -= 1
            if not self._hex_left:
                self._place = _Place.STRING
            return char in "0123456789abcdefABCDEF"
        if place is _Place.SCALAR:
            if char not in _SCALAR_ENDS:
                self._scalar.append(char)
                return True
            if not _SCALAR.fullmatch("".join(self._scalar)):
                return False
            self._place = _Place.AFTER
        return char in BLANKS or self._between(char)

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self._place = _Place.COLON if self._in_key else _Place.AFTER
        elif char == "\\":
            self._place = _Place.ESCAPE
        return char >= " "

    def _between(self, char: str) -> bool:
        """Processes a character that is not blank and is outside of strings."""
        place = self._place
        if place is _Place.START:
            return char == "{" and self._enter(char)
        if place is _Place.COLON:
            self._place = _Place.VALUE
            return char == ":"
        if place in (_Place.FIRST_KEY, _Place.KEY):
            if char == "}":
                return place is _Place.FIRST_KEY and self._leave(char)
            self._place, self._in_key = _Place.STRING, True
            return char == '"'
        if place in (_Place.VALUE, _Place.FIRST_VALUE):
            if char == "]":
                return place is _Place.FIRST_VALUE and self._leave(char)
            return self._begin_value(char)
        if place is _Place.AFTER:
            if char == ",":
                self._place = _Place.KEY if self._open[-1] == "{" else _Place.VALUE
                return True
            return self._leave(char)
        return False

    def _begin_value(self, char: str) -> bool:
        if char in _CLOSER:
            return self._enter(char)
        self._in_key = False
        if char == '"':
            self._place = _Place.STRING
        else:
            self._place, self._scalar = _Place.SCALAR, [char]
        return char in '"-0123456789tfn'

    def _enter(self, char: str) -> bool:
        self._open.append(char)
        self._place = _Place.FIRST_KEY if char == "{" else _Place.FIRST_VALUE
        return True

    def _leave(self, char: str) -> bool:
        if char != _CLOSER[self._open[-1]]:
            return False
        self._open.pop()
        self._place = _Place.AFTER if self._open else _Place.DONE
        return True
