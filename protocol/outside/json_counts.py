"""Counts what is slow to parse or large in memory in a JSON text, before it is parsed."""

from __future__ import annotations

from lorafleet.protocol.errors import BodyTooLarge
from lorafleet.protocol.limits import MAX_BODY_BRACKETS, MAX_BODY_COLONS, MAX_BODY_COMMAS


class JsonCounts:
    """The commas, brackets and colons of one text, whose parts are counted as they come.

    Args:
        what: The text's name at the beginning of error messages, such as "The body".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._commas = self._brackets = self._colons = 0

    def add(self, part: bytes) -> None:
        """Raises BodyTooLarge if the parts so far have more of them than one text may have."""
        self._commas += part.count(b",")
        self._brackets += part.count(b"{") + part.count(b"[")
        self._colons += part.count(b":")
        if self._commas > MAX_BODY_COMMAS or self._brackets > MAX_BODY_BRACKETS or self._colons > MAX_BODY_COLONS:
            raise BodyTooLarge(
                f"{self._what} has more than {MAX_BODY_COMMAS} commas, {MAX_BODY_BRACKETS} opening brackets and "
                f"braces, or {MAX_BODY_COLONS} colons; those inside strings count too. Send fewer values in one "
                "request."
            )
