"""Checks values against JSON schemas: Ray's own, pydantic's, Kubernetes', and our own for a RayService.

Ray leaves most of its schemas open, so that old versions can read new files. Here, an object whose properties are
listed has no others, unless its schema allows them. A misspelled key is a mistake, shown with the nearest known key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema

from lorafleet.cluster.checking.yaml_source import Place, Problem, YamlSource
from lorafleet.cluster.wording import nearest

Schema = dict[str, Any]


def check_keys(source: YamlSource, place: Place, value: Any, schema: Schema) -> list[Problem]:
    """Returns a problem for each key that the schema does not know. `value` is the source's value at `place`."""
    return [
        source.problem((*place, *path, key), f"unknown key {key!r}{nearest(str(key), known)}")
        for path, key, known in _unknown(schema, schema, value, ())
    ]


def check_values(source: YamlSource, place: Place, value: Any, schema: Schema) -> list[Problem]:
    """Returns a problem for each wrong type, value out of bounds, or missing key."""
    return [
        source.problem((*place, *error.absolute_path), error.message)
        for error in jsonschema.Draft202012Validator(schema).iter_errors(value)
        if error.validator != "additionalProperties"  # check_keys has a better message.
    ]


def _unknown(root: Schema, schema: Schema, value: Any, path: Place) -> Iterator[tuple[Place, Any, list[str]]]:
    branches = [branch for branch in _branches(root, schema) if _may_be(branch, value)]
    if isinstance(value, list):
        for branch in branches[:1]:
            for number, item in enumerate(value):
                yield from _unknown(root, branch.get("items", {}), item, (*path, number))
    if not isinstance(value, dict):
        return
    closed = [branch for branch in branches if "properties" in branch and not branch.get("additionalProperties")]
    if not closed and any(not _is_listed(branch) for branch in branches):
        return
    properties: Schema = {}
    for branch in closed or branches:
        properties |= branch.get("properties", {})
    for key, inner in value.items():
        if key in properties:
            yield from _unknown(root, properties[key], inner, (*path, key))
        elif (others := _others(closed or branches)) is not None:
            yield from _unknown(root, others, inner, (*path, key))
        else:
            yield path, key, list(properties)


def _branches(root: Schema, schema: Schema) -> list[Schema]:
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return _branches(root, target)
    if "anyOf" in schema:
        return [branch for option in schema["anyOf"] for branch in _branches(root, option)]
    return [schema]


def _may_be(schema: Schema, value: Any) -> bool:
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else "other"
    types = schema.get("type", kind)
    return kind in ([types] if isinstance(types, str) else types)


def _is_listed(schema: Schema) -> bool:
    return (
        "properties" in schema or "patternProperties" in schema or isinstance(schema.get("additionalProperties"), dict)
    )


def _others(branches: list[Schema]) -> Schema | None:
    """Returns the schema of keys that are not listed, or None if no others are allowed."""
    for branch in branches:
        for inner in branch.get("patternProperties", {}).values():  # Ray uses only ".*".
            return dict(inner)
        inner = branch.get("additionalProperties")
        if inner is True or isinstance(inner, dict):
            return {} if inner is True else inner
    return None
