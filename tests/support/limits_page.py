"""Writes docs/limits.md from the constants that enforce the limits, and request fields from the OpenAPI document.

python tests/support/limits_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapter_limits import ADAPTERS, PROCESSES, SERVER
from limit_rows import chars
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.openapi import openapi
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.trainer_api import trainer_routes
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.protocol.limits import Range
from request_limits import ACROSS, BATCHES, BODY, QUEUES

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
INTRODUCTION = """# Limits

Every input from outside has a bound on its size and on the work that it causes. A request that exceeds a bound is
rejected with an error in OpenAI's or Anthropic's form, which names the field, the value or size, and the bound. No
other request fails. Some bounds are changed by an option, which the table names. All others are constants.

`tests/support/limits_page.py` writes this page from the code, and a test fails if they differ. For programs,
`/openapi.json` has the bounds of all fields; a test fails if one is missing there.
"""
SECTIONS = [
    ("Headers and bodies", BODY),
    ("Several fields together", ACROSS),
    ("Queues and times", QUEUES),
    ("Files and batches", BATCHES),
    ("Helper processes", PROCESSES),
    ("Adapters and their files", ADAPTERS),
    ("Administration, directory, keys and logs", SERVER),
]


def bounds_of(schema: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """Returns the bounds of a field and of its items, in words."""
    if "$ref" in schema:
        return []
    if "enum" in schema:
        return [f"one of {len(schema['enum'])} values"]
    found: list[str] = []
    for inner in schema.get("anyOf", schema.get("oneOf", ())):
        found += bounds_of(inner, definitions)
    if "maxLength" in schema:
        found.append(chars(schema["maxLength"]))
    if "maximum" in schema:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        found.append(str(Range(low, schema["maximum"], "exclusiveMinimum" in schema)))
    if "maxItems" in schema:
        inside = [bound for bound in bounds_of(schema.get("items", {}), definitions) if bound]
        found.append(f"{schema['maxItems']:,} entries" + (f" of {' or '.join(inside)}" if inside else ""))
    if "maxProperties" in schema:
        found.append(f"{schema['maxProperties']:,} entries")
    return list(dict.fromkeys(found))


def fields() -> Iterator[tuple[str, str, list[str]]]:
    """Yields each route's body, field and bounds. Booleans and fields without effect need no bounds."""
    routes = [*ROUTES, *admin_routes(None), *trainer_routes(None), *batch_routes()]  # type: ignore[arg-type]  # The routes are only described here.
    document = openapi(routes)
    definitions = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            properties = definitions[content["schema"]["$ref"].rpartition("/")[2]]["properties"] if content else {}
            for name, schema in properties.items():
                if (bounds := bounds_of(schema, definitions)) and "enum" not in schema:
                    yield path, name, bounds
            for parameter in operation["parameters"]:
                if parameter["in"] == "query" and (bounds := bounds_of(parameter["schema"], definitions)):
                    yield path, f"?{parameter['name']}=", bounds


def field_rows() -> list[str]:
    """Returns one row for each field and bound, with the routes that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for path, name, bounds in fields():
        rows.setdefault((name, "; ".join(bounds)), []).append(f"`{path}`")
    return [f"| `{name}` | {bound} | {', '.join(paths)} |" for (name, bound), paths in sorted(rows.items())]


def write() -> str:
    parts = [INTRODUCTION]
    for title, rows in SECTIONS:
        parts.append(f"\n## {title}\n\n| what | bound | changed by | if exceeded |\n|---|---|---|---|\n")
        for name, bound, changed_by, answer in rows:
            shown = f"{bound:,}" if isinstance(bound, int) else str(bound)
            parts.append(f"| {name} | {shown} | {changed_by or 'constant'} | {answer} |\n")
    parts.append(
        "\n## Fields of requests\n\nThese bounds are constants. A value beyond one gets a 400 that names the field.\n"
    )
    parts.append("\n| field | bound | routes |\n|---|---|---|\n" + "\n".join(field_rows()) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(write())
