"""Bounds as annotations of pydantic fields: AtMost for sizes, Within for numbers, AnyJSON for values of any shape.

Each bound is checked before the value's content is read, so that a value that is too large costs only its parsing.
Each bound is also added to the field's JSON schema, which /openapi.json shows.
"""

from __future__ import annotations

import functools
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lorafleet.protocol import limits
from lorafleet.protocol.limits import Range, shown_number

OVER_BOUND = "over_bound"  # The pydantic type of the errors that are raised here.
# The Python types that a bound measures, by the type that it annotates. So in a union of a text and a list, the bound
# of the text does not measure a list.
_MEASURED: dict[object, tuple[type[Sized], ...]] = {str: (str,), list: (list,), dict: (dict,)}
_KEYWORDS = {"string": "maxLength", "array": "maxItems", "object": "maxProperties"}


def over_bound(message: str) -> PydanticCustomError:
    """Returns an error whose message follows the field's name in the answer."""
    return PydanticCustomError(OVER_BOUND, "{message}", {"message": message})


@dataclass(frozen=True, slots=True)
class AtMost:
    """The maximum number of characters of a text, or of entries of a list or mapping."""

    bound: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        measured = _MEASURED.get(get_origin(source) or source, (str, list, dict))
        check = functools.partial(self._check, measured)
        made: Any = handler(source)
        if made["type"] == "list":
            made["fail_fast"] = True  # An error takes a kilobyte, and each entry may have several.
        return core_schema.no_info_before_validator_function(check, made)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        made = handler(schema)
        return made | {_KEYWORDS[made["type"]]: self.bound}

    def _check(self, measured: tuple[type[Sized], ...], value: object) -> object:
        if isinstance(value, measured) and len(value) > self.bound:
            what = "characters" if isinstance(value, str) else "entries"
            raise over_bound(f"has {len(value)} {what}; at most {self.bound} are allowed")
        return value


@dataclass(frozen=True, slots=True)
class Within:
    """The range of a number."""

    bounds: Range

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | range_schema(self.bounds)

    def _check(self, value: object, handler: core_schema.ValidatorFunctionWrapHandler) -> object:
        self._check_number(value)  # An integer may be too large to become a float.
        number = handler(value)  # A query parameter becomes a number only here.
        self._check_number(number)
        return number

    def _check_number(self, value: object) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in self.bounds:
            raise over_bound(f"is {shown_number(value)}; it must be in {self.bounds}")


def range_schema(bounds: Range) -> dict[str, Any]:
    return {"exclusiveMinimum" if bounds.open_low else "minimum": bounds.low, "maximum": bounds.high}


@dataclass(frozen=True, slots=True)
class AnyJSON:
    """A value of unknown shape, with bounds on the number of its values, their depth and their sizes."""

    max_chars: int = limits.MAX_JSON_TEXT_CHARS  # Limit of all keys and texts in it together.

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | JSON_BOUNDS

    def _check(self, value: object) -> object:
        fault = fault_of_json(value, self.max_chars)
        if fault is not None:
            raise over_bound(fault)
        return value


# JSON Schema has no keywords for these bounds.
JSON_BOUNDS: dict[str, Any] = {
    "x-max-values": limits.MAX_JSON_VALUES,
    "x-max-depth": limits.MAX_JSON_DEPTH,
    "x-max-text": limits.MAX_JSON_TEXT_CHARS,
}


def json_schema(max_chars: int) -> dict[str, Any]:
    """Returns the schema of the values that fault_of_json() accepts."""
    bounds = JSON_BOUNDS | {"x-max-text": max_chars}
    return {
        "anyOf": [
            {"type": ["boolean", "null"]},
            {"type": "number", **range_schema(limits.JSON_NUMBER)},
            {"type": "string", "maxLength": max_chars},
            {"type": "array", "maxItems": limits.MAX_JSON_VALUES, **bounds},
            {"type": "object", "maxProperties": limits.MAX_JSON_VALUES, **bounds},
        ]
    }


def fault_of_json(value: object, max_chars: int) -> str | None:
    """Returns which bound the value exceeds, as a text to follow the field's name, or None.

    It visits the value level by level, so that depth needs no recursion.
    """
    level, num_values, num_chars = [value], 1, 0
    for _ in range(limits.MAX_JSON_DEPTH):
        inner: list[object] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += entry.values()
                num_chars += sum(map(len, entry))
                if max(map(len, entry), default=0) > limits.MAX_JSON_KEY_CHARS:
                    return f"has a key of more than {limits.MAX_JSON_KEY_CHARS} characters, which is the limit"
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, str):
                if len(entry) > max_chars:
                    return f"has a string of {len(entry)} characters; at most {max_chars} are allowed"
                num_chars += len(entry)
            elif isinstance(entry, int) and entry not in limits.JSON_NUMBER:
                return f"has the number {shown_number(entry)}; it must be in {limits.JSON_NUMBER}"
        num_values += len(inner)
        if num_values > limits.MAX_JSON_VALUES:
            return f"has more than {limits.MAX_JSON_VALUES} values, which is the limit"
        if num_chars > max_chars:
            return f"has keys and strings of {num_chars} characters in total; at most {max_chars} are allowed"
        if not inner:
            return None
        level = inner
    return f"is nested deeper than {limits.MAX_JSON_DEPTH} levels, which is the limit"
