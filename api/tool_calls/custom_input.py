"""The input of a custom tool as the arguments of the function in whose place the model calls it."""

from __future__ import annotations

import json
import re
from typing import Literal

from lorafleet.api.tool_calls.json_scanner import BLANKS

PARAMETER = "input"
_OPENING = re.compile(r'\{[ \t\n\r]*"input"[ \t\n\r]*:[ \t\n\r]*"')
_BEGINNINGS = re.compile(r'(\{[ \t\n\r]*("(i(n(p(u(t("[ \t\n\r]*(:[ \t\n\r]*)?)?)?)?)?)?)?)?)?')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


def arguments_of(given: str) -> str:
    """Returns the arguments of the function in whose place a custom tool was called with this input."""
    return json.dumps({PARAMETER: given}, ensure_ascii=False)


class InputReader:
    """Reads the input of a custom tool out of its arguments while the model writes them.

    Arguments of another form, which a model may write if no grammar constrains it, are passed on as they are.
    """

    def __init__(self) -> None:
        self._state: Literal["opening", "text", "other", "closed"] = "opening"
        self._held = ""  # Text that does not decide yet, or the beginning of an escape.

    def push(self, text: str) -> str:
        """Returns the next piece of the input."""
        self._held += text
        if self._state == "opening":
            self._open()
        if self._state == "other":
            made, self._held = self._held, ""
            return made
        return self._read_text() if self._state == "text" else ""

    def finish(self) -> str:
        """Returns the rest of arguments that ended before they were complete."""
        made, self._held = self._held, ""
        return made if self._state == "opening" else ""

    def _open(self) -> None:
        text = self._held.lstrip(BLANKS)
        found = _OPENING.match(text)
        if found is not None:
            self._state, self._held = "text", text[found.end() :]
        elif _BEGINNINGS.fullmatch(text) is None:
            self._state = "other"

    def _read_text(self) -> str:
        made, text = list[str](), self._held
        position = 0
        while position < len(text) and self._state == "text":
            plain = _PLAIN.match(text, position)
            if plain is not None:
                made.append(plain[0])
                position = plain.end()
                continue
            end = _end_of_letter(text, position)
            if end is None:
                break
            letter = text[position:end]
            if letter == '"':
                self._state = "closed"
            else:
                made.append(_decoded(letter))
            position = end
        self._held = text[position:]
        return "".join(made)


def _end_of_letter(text: str, begin: int) -> int | None:
    """Returns where the quote or escape of a JSON text that begins here ends, or None if its end has not arrived. Two
    escapes that are one character are one letter."""
    if text[begin] == '"':
        return begin + 1
    if len(text) < begin + 2:
        return None
    if text[begin + 1] != "u":
        return begin + 2
    if len(text) < begin + 6:
        return None
    if text[begin + 2 : begin + 4].lower() not in ("d8", "d9", "da", "db"):
        return begin + 6
    if not "\\u".startswith(text[begin + 6 : begin + 8]):
        return begin + 6
    return begin + 12 if len(text) >= begin + 12 else None


def _decoded(letter: str) -> str:
    if letter[1] != "u":
        return _ESCAPES.get(letter[1], letter)
    try:
        decoded: str = json.loads(f'"{letter}"')
    except ValueError:
        return letter
    return decoded.encode(errors="replace").decode()  # Half of a surrogate pair cannot be sent.
