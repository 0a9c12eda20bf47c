"""Counts text from outside before it is repeated, joined or written as JSON, so that a refusal costs no memory.

Whoever makes a text of a request's values takes each piece from a budget first. The budget raises InvalidRequest
before more exists than its bound allows.
"""

from __future__ import annotations

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_JSON_DEPTH, MAX_SOURCE_BYTES

_GRAMMAR = "as a grammar, in which each use of a text counts"


class TextBudget:
    """The characters that may still be made of one field of a request.

    Args:
        param: The request's field, for error messages.
        what: The form of the text that is made, for error messages.
    """

    def __init__(self, param: str, most_chars: int = MAX_SOURCE_BYTES, what: str = _GRAMMAR) -> None:
        self._param = param
        self._most_chars = most_chars
        self._what = what
        self._num_chars = 0

    def text(self, piece: str) -> str:
        """Counts the piece, and returns it. Raises InvalidRequest if there is no room for it."""
        self._take(len(piece))
        return piece

    def value(self, value: object, where: str) -> None:
        """Counts the JSON text of a value, which is visited level by level. `where` is the value's place, for error
        messages. Raises InvalidRequest if there is no room for it, or if it is nested too deeply."""
        level = [value]
        for _ in range(MAX_JSON_DEPTH):
            inner: list[object] = []
            for entry in level:
                if isinstance(entry, dict):
                    self._take(2 + sum(map(len, entry)) + 4 * len(entry))  # Quotes, a colon and a comma for each key.
                    inner += entry.values()
                elif isinstance(entry, list):
                    self._take(2 + len(entry))
                    inner += entry
                else:
                    self._take(len(entry) + 2 if isinstance(entry, str) else 1)
            if not inner:
                return
            level = inner
        raise InvalidRequest(f"`{where}` is nested deeper than {MAX_JSON_DEPTH} levels; use $defs and $ref.", where)

    def _take(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._num_chars > self._most_chars:
            raise InvalidRequest(
                f"`{self._param}` has more than {self._most_chars} characters {self._what}; that is the limit. Shorten "
                "its texts, or give fewer of them.",
                self._param,
            )
