"""Unknown keys by JSON schema: closed unless it says so."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lorafleet.cluster.checking.keys import Schema, check_keys, check_values, nearest
from lorafleet.cluster.checking.yaml_source import parse

TEXT: Schema = {"type": "string"}
SCHEMA: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": TEXT,
        "count": {"type": "integer"},
        "labels": {"type": "object", "additionalProperties": TEXT},
        "items": {"type": "array", "items": {"type": "object", "properties": {"path": TEXT}}},
        "rest": {},
    },
}


def complaints(value: Any) -> list[str]:
    source = parse("f", yaml.safe_dump(value))
    problems = check_keys(source, (), value, SCHEMA) + check_values(source, (), value, SCHEMA)
    return [f"{problem.place}: {problem.message}" for problem in problems]


def test_what_the_schema_allows_passes():
    assert complaints({"name": "a", "count": 1, "labels": {"x": "y"}, "items": [{"path": "p"}], "rest": {"z": 1}}) == []


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"name": "a", "cuont": 1}, "cuont: unknown key 'cuont'; did you mean 'count'?"),
        ({"name": "a", "items": [{}, {"pth": "p"}]}, "items[1].pth: unknown key 'pth'; did you mean 'path'?"),
        ({"name": "a", "zzz": 1}, "zzz: unknown key 'zzz'. Known: count, items, labels, name, rest."),
        ({}, ": 'name' is a required property"),
        ({"name": "a", "count": "b"}, "count: 'b' is not of type 'integer'"),
        ({"name": "a", "labels": {"x": 1}}, "labels.x: 1 is not of type 'string'"),
    ],
)
def test_what_it_does_not_allow_is_told_with_its_place(value: Any, complaint: str):
    assert complaints(value) == [complaint]


def test_a_union_takes_the_keys_of_the_branch_that_lists_some():
    closed = {"anyOf": [{"type": "object", "additionalProperties": True}, {"$ref": "#/$defs/c"}, {"type": "null"}]}
    of = {
        "properties": {"c": closed},
        "$defs": {"c": {"type": "object", "properties": {"min_replicas": {"type": "integer"}}}},
    }
    (problem,) = check_keys(parse("f", "c: {min_replica: 1}"), (), {"c": {"min_replica": 1}}, of)
    assert "did you mean 'min_replicas'?" in problem.message
    assert check_keys(parse("f", "c: null"), (), {"c": None}, of) == []


def test_where_nothing_is_near_some_are_named():
    assert nearest("zzz", [f"k{n:02}" for n in range(20)]).endswith("k11, ….")
    assert nearest("zzz", []) == "; none is taken here."
