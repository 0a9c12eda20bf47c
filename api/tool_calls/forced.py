"""Parses answers to requests that demand a call: the arguments alone for a named function, otherwise an array of
calls.

The constraint (function_tools.py) allows the model to write nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafleet.api.tool_calls.call_array import CallArray
from lorafleet.api.tool_calls.json_scanner import BLANKS
from lorafleet.api.tool_calls.parser import CallArguments, Calls, Event, Text


class NamedCallParser:
    def __init__(self, calls: Calls, name: str) -> None:
        self._start = calls.start(name)
        self._opened = False

    def push(self, text: str) -> list[Event]:
        if not self._opened:
            text = text.lstrip(BLANKS)  # Blanks between reasoning and the arguments.
        if not text:
            return []
        opening: list[Event] = [] if self._opened else [self._start]
        self._opened = True
        return [*opening, CallArguments(self._start.index, text)]

    def finish(self) -> list[Event]:
        return []


class RequiredCallsParser:
    """The parser of an array of calls; `calls` must be eager. If the answer's length cuts off a call, the part that
    was written is shown."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._array: CallArray | None = None

    def push(self, text: str) -> list[Event]:
        if self._array is None:
            text = text.lstrip(BLANKS)
            if not text:
                return []
            self._array = CallArray(self._calls, text[:1])
            text = text[1:]
        return self._array.push(text)[0]

    def finish(self) -> list[Event]:
        events = [] if self._array is None else self._array.finish()
        return [event for event in events if not isinstance(event, Text)]


def calls_schema(arguments: Mapping[str, dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Returns the schema of the array that RequiredCallsParser reads.

    `arguments` has each function's schema by its name. Its inner references are adapted to its new place.
    """
    definitions = {f"tool_{i}": _moved(schema, f"#/$defs/tool_{i}") for i, schema in enumerate(arguments.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool_{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, name in enumerate(arguments)
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: to + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, to)
        for name, value in schema.items()
    }
