"""Everything that /openapi.json says a request may have is bounded, and what is over a bound is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lorafleet.api.request.fields import NO_EFFECT
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.openapi import openapi
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.trainer_api import trainer_routes
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.quality.routes import QualityApi

ALL_ROUTES = [
    *ROUTES,
    *admin_routes(None),  # type: ignore[arg-type]  # only described, as are the others
    *trainer_routes(None),  # type: ignore[arg-type]
    *QualityApi(None).routes(),  # type: ignore[arg-type]
    *batch_routes(),
]
DOCUMENT = openapi(ALL_ROUTES)
Schema = dict[str, Any]


def operations() -> Iterator[tuple[str, str, Schema]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def requested(operation: Schema) -> Iterator[tuple[str, Schema]]:
    """Each parameter and body, with its place."""
    for parameter in operation["parameters"]:
        yield f"{parameter['in']} {parameter['name']}", parameter["schema"]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        if kind not in (
            "application/x-tar",
            "application/octet-stream",
            "multipart/form-data",
        ):  # its bound is of its files, which docs/limits.md has
            yield "body", content["schema"]


def unbounded(schema: Any, place: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """The places where a value of any size fits."""
    if schema is False:
        return
    if schema is True or not set(schema) - {"description", "title", "default"}:
        yield f"{place}: anything"
        return
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from unbounded(DOCUMENT["components"]["schemas"][name], place, seen | {name})
        return
    if "enum" in schema or "const" in schema:
        return
    for word in ("anyOf", "oneOf", "allOf"):
        for i, inner in enumerate(schema.get(word, ())):
            yield from unbounded(inner, f"{place}/{word}{i}", seen)
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        yield from unbounded_kind(kind, schema, place, seen)
    if not kinds and not {"anyOf", "oneOf", "allOf"} & set(schema):
        yield f"{place}: no type"


def unbounded_kind(kind: str, schema: Schema, place: str, seen: frozenset[str]) -> Iterator[str]:
    if kind == "string" and "maxLength" not in schema:
        yield f"{place}: string"
    ends = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    if kind in ("number", "integer") and not all(set(end) & set(schema) for end in ends):
        yield f"{place}: number"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{place}: list"
        if "x-max-values" not in schema:
            yield from unbounded(schema.get("items", True), f"{place}[]", seen)
    if kind == "object":
        yield from unbounded_object(schema, place, seen)


def unbounded_object(schema: Schema, place: str, seen: frozenset[str]) -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        yield from unbounded(inner, f"{place}.{name}", seen)
    more = schema.get("additionalProperties", True)
    if more is False or {"x-max-values", "maxProperties"} <= set(schema):
        return
    if "maxProperties" not in schema:
        yield f"{place}: mapping"
    if "maxLength" not in schema.get("propertyNames", {}):
        yield f"{place}: keys of a mapping"
    yield from unbounded(more, f"{place}.*", seen)


@pytest.mark.parametrize(
    ("method", "path", "operation"), list(operations()), ids=[f"{method} {path}" for method, path, _ in operations()]
)
def test_whatever_a_request_may_have_is_bounded(method: str, path: str, operation: Schema) -> None:
    found = [place for where, schema in requested(operation) for place in unbounded(schema, where)]
    assert not found, f"{method} {path}"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "array", "items": {"type": "boolean"}},
        {"type": "array", "maxItems": 3, "items": {"type": "string"}},
        {"type": "array", "maxItems": 3},
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "boolean"}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
        {"type": "integer", "minimum": 0},
        {"anyOf": [{"type": "null"}, {"type": "number", "maximum": 3}]},
        {"type": ["string", "null"]},
        {},
    ],
)
def test_the_walk_finds_what_has_no_bound(schema: Schema) -> None:
    assert list(unbounded(schema, "here"))


# -- the bounds are kept -----------------------------------------------------------------------------------------------

LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/generate": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
LARGEST = 200_000  # longer texts are left to test_bounds.py


def resolved(schema: Schema) -> Schema:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def least(schema: Any) -> Any:
    """A small value that fits."""
    schema = resolved(schema)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "anyOf" in schema or "oneOf" in schema:
        return least(schema.get("anyOf", schema.get("oneOf"))[0])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind in ("number", "integer"):
        return max(1, schema["minimum"]) if "minimum" in schema else 1
    if kind == "array":
        return [least(schema.get("items", {"const": 0}))] * schema.get("minItems", 0)
    if kind == "object":
        return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
    return {"string": "a", "boolean": True, "null": None}[kind]


def over(schema: Any, depth: int = 6) -> Iterator[Any]:
    """Values with one thing too many or too large, one for each bound."""
    schema = resolved(schema)
    if not depth or "enum" in schema or "const" in schema:
        return
    for inner in schema.get("anyOf", schema.get("oneOf", ())):
        yield from over(inner, depth)
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        yield from over_kind(kind, schema, depth)


def over_kind(kind: str, schema: Schema, depth: int) -> Iterator[Any]:
    if kind == "string" and schema["maxLength"] < LARGEST:
        yield "a" * (schema["maxLength"] + 1)
    if kind in ("number", "integer"):
        low, high = int(schema.get("minimum", schema.get("exclusiveMinimum"))), int(schema["maximum"])
        yield high + (1 if kind == "integer" else max(1, abs(high)))
        yield low - (1 if kind == "integer" else max(1, abs(low)))
    if kind == "array":
        items = schema.get("items", {"const": 0})
        if schema["maxItems"] * len(json.dumps(least(items))) < LARGEST:
            yield [least(items)] * (schema["maxItems"] + 1)
        yield from ([value] for value in over(items, depth - 1))
    if kind == "object":
        whole = least(schema)
        for name, inner in schema.get("properties", {}).items():
            yield from ({**whole, name: value} for value in over(inner, depth - 1))
        if schema.get("additionalProperties", True) is not False:
            value = least(schema["additionalProperties"]) if "propertyNames" in schema else 0
            yield {**whole, **{str(i): value for i in range(schema["maxProperties"] + 1)}}


@pytest.mark.parametrize("path", LEAST)
async def test_what_is_over_any_documented_bound_is_refused(http: httpx.AsyncClient, path: str) -> None:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    for name, field in resolved(content["schema"])["properties"].items():
        if name in NO_EFFECT and path != "/v1/completions":
            continue
        for value in over(field):
            body = json.dumps(LEAST[path] | {name: value})
            response = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400, shown(name, value, response)
            error = response.json()["error"]
            assert (
                error.get("param", "`" in error["message"])
                and len(error["message"]) < 700
                and len(error.get("param", "")) < 400
            ), shown(name, value, response)


# Texts that codecs, numbers, patterns, paths and terminals stumble over, as JSON.
ODD = [r'"\ud800"', r'"\u0000\u202e\u001b[31m"', f'"{"9" * 5000}"', '"(?P<a>../"', "1" + "0" * 400]


@pytest.mark.parametrize("path", LEAST)
async def test_odd_values_are_no_fault_of_the_server(http: httpx.AsyncClient, path: str) -> None:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    for name in resolved(content["schema"])["properties"]:
        rest = json.dumps({key: value for key, value in LEAST[path].items() if key != name})[1:]
        for value in ODD:
            body = f"{{{json.dumps(name)}: {value}{', ' if rest != '}' else ''}{rest}"
            response = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code < 500, f"{name}: {value[:100]} {response.text[:300]}"


def shown(name: str, value: Any, response: httpx.Response) -> str:
    return f"{name}: {json.dumps(value)[:200]} {response.text[:300]}"
