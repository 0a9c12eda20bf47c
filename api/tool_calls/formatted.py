"""Parses an answer that is either calls or text of a given format; its beginning decides which."""

from __future__ import annotations

import json

from lorafleet.api.tool_calls.parser import Event, ToolCallParser, shown
from lorafleet.protocol.structured_spec import StructuredOutputs


class FormattedParser:
    """A parser that passes calls on to another parser, and shows any other answer as text.

    Args:
        openings: The possible beginnings of calls, without blanks.
        calls: The parser of the calls.
    """

    def __init__(self, openings: tuple[str, ...], calls: ToolCallParser) -> None:
        self._openings = openings
        self._calls = calls
        self._begun: str | None = ""  # the text so far, until it decides
        self._is_calls = False

    def push(self, text: str) -> list[Event]:
        if self._begun is not None:
            text, self._begun = self._begun + text, None
            seen = "".join(text.split())
            self._is_calls = any(seen.startswith(opening) for opening in self._openings)
            if not self._is_calls and any(opening.startswith(seen) for opening in self._openings):
                self._begun = text
                return []
        return self._calls.push(text) if self._is_calls else shown(text)

    def finish(self) -> list[Event]:
        return self._calls.finish() if self._is_calls else shown(self._begun or "")


def may_open_like(text: StructuredOutputs, openings: tuple[str, ...]) -> bool:
    """Returns whether JSON of this format may begin with one of the openings; true also if a schema is too complex to
    decide."""
    names = [opening[2:-1] for opening in openings if opening.startswith('{"')]
    if not names:
        return False  # JSON never begins with a marker
    schema = {} if text.kind == "json_object" else json.loads(text.source)
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return not isinstance(schema, dict) or schema.get("type") not in (
            "array",
            "string",
            "number",
            "integer",
            "boolean",
        )
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return not closed or any(name in schema.get("properties", {}) for name in names)
