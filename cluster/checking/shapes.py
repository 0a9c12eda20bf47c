"""JSON schemas written short: {"name!": TEXT, "items": [{"path": TEXT}]}, where ! marks what must be there.

Objects have no other keys than theirs. OPEN is what is not looked into.
"""

from __future__ import annotations

from typing import Any

from lorafleet.cluster.checking.keys import Schema

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
AMOUNT: Schema = {"type": ["integer", "string"]}  # Kubernetes: 8080 or "http", 4 or "4Gi"
OPEN: Schema = {}

Shape = Schema | list[Any]


def table(of: Schema) -> Schema:
    """An object with keys of the user's own."""
    return {"type": "object", "additionalProperties": of}


TEXTS = table(TEXT)
AMOUNTS = table({"type": ["integer", "number", "string"]})


def words(*allowed: str) -> Schema:
    return {"type": "string", "enum": list(allowed)}


def schema(shape: Shape) -> Schema:
    if isinstance(shape, list):
        return {"type": "array", "items": schema(shape[0])}
    if not shape or isinstance(shape.get("type"), str | list):  # a schema already
        return shape
    return {
        "type": "object",
        "properties": {name.removesuffix("!"): schema(inner) for name, inner in shape.items()},
        "required": [name[:-1] for name in shape if name.endswith("!")],
    }
