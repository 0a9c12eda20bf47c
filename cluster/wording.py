"""Words the errors in files and arguments in one way, whichever of the strict parsers finds them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

MAX_KNOWN = 12  # Names that a message lists if none of them is similar.


def nearest(name: str, known: Iterable[str], most: int = MAX_KNOWN) -> str:
    """Returns the end of a message about an unknown name: the most similar known name, or a list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if not names:
        return "; none is taken here."
    return f". Known: {', '.join(names[:most])}{', …' if len(names) > most else ''}."


def in_words(error: Mapping[str, Any]) -> str:
    """Returns the text of one of pydantic's errors(): the field's path and the message."""
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
