from __future__ import annotations

import json

import msgspec
import pytest

from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_JSON_DEPTH
from lorafleet.protocol.sampling_params import SamplingParams


def test_a_schema_given_as_text_is_the_same_as_one_given_parsed():
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    made = structured_spec.json_schema(schema, "response_format")
    assert made == structured_spec.json_schema(json.dumps(schema), "response_format")
    assert json.loads(made.source) == schema
    assert made.source.index('"b"') < made.source.index('"a"')


def test_a_constraint_survives_the_way_to_the_engine():
    params = SamplingParams(structured_outputs=structured_spec.choice(["yes", "no", "yes"], "guided_choice"))
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert back == params
    assert back.structured_outputs is not None
    assert json.loads(back.structured_outputs.source) == ["yes", "no"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: structured_spec.json_schema("{", "x"), "`x` is not valid JSON"),
        (lambda: structured_spec.json_schema("[" * 100_000, "x"), "`x` is not valid JSON"),
        (lambda: structured_spec.json_schema([1], "x"), "must be a JSON schema"),
        (lambda: structured_spec.json_schema('{"minimum": NaN}', "x"), "NaN"),
        (lambda: structured_spec.json_schema('{"const": "\\ud800"}', "x"), "surrogate"),
        (lambda: structured_spec.json_schema({"enum": ["x" * 2_000_000]}, "x"), "more than 1048576"),
        (lambda: structured_spec.regex("", "x"), "not empty"),
        (lambda: structured_spec.grammar("a" * 2_000_000, "x"), "at most 1048576"),
        (lambda: structured_spec.choice([], "x"), "at least one"),
        (lambda: structured_spec.choice(["a", ""], "x"), "none may be empty"),
        (lambda: structured_spec.choice([str(i) for i in range(10_001)], "x"), "at most 10000"),
    ],
)
def test_what_is_no_constraint_is_refused_with_the_field_that_it_stood_in(make, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        make()
    assert refused.value.param == "x"


def test_a_schema_nested_too_deep_is_refused_however_it_came():
    schema: dict[str, object] = {}
    for _ in range(MAX_JSON_DEPTH):
        schema = {"not": schema}
    with pytest.raises(InvalidRequest, match="deeper than 64 levels"):
        structured_spec.json_schema(schema, "x")


def test_min_tokens_beside_a_constraint_is_refused():
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(structured_outputs=structured_spec.json_object("x"), min_tokens=3)
