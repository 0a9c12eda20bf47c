"""Decides which parameters of a function are texts, for formats that write texts without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEFINITIONS = ("#/$defs/", "#/definitions/")
MAX_REFERENCES = 16


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follows references to definitions of the root. Others stay as they are."""
    for _ in range(MAX_REFERENCES):
        to = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(to, str) or not to.startswith(_DEFINITIONS):
            break
        _, place, name = to.split("/", 2)
        found = root.get(place)
        schema = found.get(name) if isinstance(found, dict) else None
    return schema


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Returns whether all values of the schema are texts."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") in ("string", ["string"])


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schemas of the parameters by their names."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
