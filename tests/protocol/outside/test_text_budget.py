"""Text from outside is counted before more of it is made."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from lorafleet.api.request.structural_tag import structural_tag
from lorafleet.api.tool_calls.call_grammar import Offer
from lorafleet.api.tool_calls.known import FORMATS
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.outside.text_budget import TextBudget
from lorafleet.protocol.structured_spec import JsonPart

LARGE = {"enum": [f"{i:0100d}" for i in range(5000)]}  # 0.5 MB


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": [1, 2.5, None, True]},
        [[], {}, [[]]],
        {"é": "ü", "": ""},
        ["x"] * 50,
        {str(i): i for i in range(50)},
    ],
)
def test_a_value_counts_no_more_than_its_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    TextBudget("x", len(text)).value(value, "x")
    with pytest.raises(InvalidRequest, match="`x` has more than"):
        TextBudget("x", len(text) // 4).value([value, "y" * len(text)], "x")


def test_pieces_share_one_budget_and_values_have_a_depth() -> None:
    budget = TextBudget("x", 10)
    assert budget.text("12345") == "12345"
    budget.value("abc", "y")
    with pytest.raises(InvalidRequest, match="more than 10 characters"):
        budget.text("1")
    with pytest.raises(InvalidRequest, match="`y` is nested deeper than 64 levels"):
        TextBudget("x").value(json.loads("[" * 70 + "]" * 70), "y")


def shared_definitions(number: int) -> dict[str, Any]:
    properties = {f"p{i}": {"$ref": "#/$defs/number"} for i in range(number)}
    return {"type": "object", "properties": properties, "$defs": {"number": {"type": "integer"}, "large": LARGE}}


def shared_texts(number: int) -> dict[str, Any]:
    properties = {f"p{i}": {"$ref": "#/$defs/large"} for i in range(number)}
    return {"type": "object", "properties": properties, "$defs": {"large": LARGE}}


def many_parameters(number: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(number)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def grammar_of(name: str, schema: dict[str, Any]) -> object:
    offer = Offer({"f": schema}, {f"<{i}>": i for i in range(1000)})
    return offer.constraint(FORMATS[name].grammar(offer))


def triggers() -> object:
    texts = [f"{i:02d}{'x' * 4000}" for i in range(64)]
    tags = [{"begin": text, "schema": {}, "end": "e"} for text in texts]
    return structural_tag({"triggers": texts, "structures": tags}, "x", {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammar_of("qwen3_coder", shared_definitions(1000)),
        lambda: grammar_of("qwen3_coder", shared_texts(1000)),
        lambda: grammar_of("glm45", shared_texts(1000)),
        lambda: grammar_of("llama4_pythonic", shared_definitions(1000)),
        lambda: grammar_of("qwen3_coder", many_parameters(60_000)),
        lambda: structured_spec.tagged("start: a", [JsonPart("a", LARGE, "x")] * 3, "x"),
        lambda: structured_spec.choice(["x" * 1000] * 9000, "x"),
        lambda: structured_spec.json_schema([LARGE, LARGE, LARGE], "x"),
        lambda: structured_spec.json_schema({"allOf": [LARGE] * 3}, "x"),
    ],
)
def test_what_would_be_too_large_is_refused_before_it_is_made(make: Callable[[], object]) -> None:
    LARGE["enum"][0]  # The values exist before the measurement.
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            make()
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_trigger_is_written_once_for_all_others() -> None:
    made: Any = triggers()
    assert len(made.source) < 4 * 64 * 4002 + 200_000


def test_shared_definitions_that_fit_are_served() -> None:
    made: Any = grammar_of("qwen3_coder", {**many_parameters(20), "$defs": {"a": {"enum": ["x" * 1000]}}})
    assert made.kind == "tagged"
