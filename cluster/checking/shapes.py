"""Builds JSON schemas from a short form: {"name!": TEXT, "items": [{"path": TEXT}]}, where ! marks a required key.

An object has no other keys than those listed. OPEN accepts anything.
"""

from __future__ import annotations

from typing import Any

from lorafleet.cluster.checking.keys import Schema

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
AMOUNT: Schema = {"type": ["integer", "string"]}  # Kubernetes accepts 8080 or "http", 4 or "4Gi".
OPEN: Schema = {}

Shape = Schema | list[Any]


def table(of: Schema) -> Schema:
    """Returns the schema of an object whose keys the user chooses."""
    return {"type": "object", "additionalProperties": of}


TEXTS = table(TEXT)
AMOUNTS = table({"type": ["integer", "number", "string"]})


def words(*allowed: str) -> Schema:
    return {"type": "string", "enum": list(allowed)}


def schema(shape: Shape) -> Schema:
    if isinstance(shape, list):
        return {"type": "array", "items": schema(shape[0])}
    if not shape or isinstance(shape.get("type"), str | list):  # It is a schema already.
        return shape
    return {
        "type": "object",
        "properties": {name.removesuffix("!"): schema(inner) for name, inner in shape.items()},
        "required": [name[:-1] for name in shape if name.endswith("!")],
    }
