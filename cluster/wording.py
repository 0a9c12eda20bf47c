"""How errors in files and arguments are worded, whichever of the strict readers finds them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

MAX_KNOWN = 12  # names that a message lists where none is near


def nearest(name: str, known: Iterable[str], most: int = MAX_KNOWN) -> str:
    """The end of a message about a name that is not known."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if not names:
        return "; none is taken here."
    return f". Known: {', '.join(names[:most])}{', …' if len(names) > most else ''}."


def in_words(error: Mapping[str, Any]) -> str:
    """error: one of pydantic's errors()."""
    where = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
