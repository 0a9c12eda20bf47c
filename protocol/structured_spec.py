"""What an answer must look like, as a request says it: plain data that crosses to the engine in SamplingParams.

Made by the functions here, which check shape and size; whether a grammar can be served is found out where it is
compiled, workers/structured/grammar_program.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import (
    MAX_CHOICES,
    MAX_DESCRIPTION_CHARS,
    MAX_JSON_DEPTH,
    MAX_LABEL_CHARS,
    MAX_SOURCE_BYTES,
    cut,
)

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tagged"]

ADAPTERS_DEFAULT = "lorafleet.json: response_format"  # where an adapter's folder says what its answers look like


class StructuredOutputs(msgspec.Struct, frozen=True):
    """The whole answer must match. Two that are equal but for `param` compile to the same.

    source: the schema's JSON text, whose order of properties the answer follows; the regex; the choices as a JSON list;
    the grammar in Lark or GBNF; "" of json_object; of tagged the JSON of [Lark, [[rule, schema, where, any_whitespace],
    …]]: text that may have JSON of several schemas in it, each a rule of the Lark.
    any_whitespace: of JSON: whether the model may lay it out; False: no blank outside of texts.
    param: the request's field that asked for it, which errors name.
    """

    kind: Kind
    source: str = ""
    any_whitespace: bool = True
    param: str = "structured_outputs"


class JsonPart(msgspec.Struct, frozen=True, array_like=True):
    """where: the request's field that has the schema, which errors name."""

    rule: str
    schema: dict[str, Any] | bool
    where: str
    any_whitespace: bool = True


def json_schema(schema: object, param: str, *, any_whitespace: bool = True) -> StructuredOutputs:
    """schema: parsed, or as text; true and false are schemas too."""
    if isinstance(schema, str):
        _check_size(schema, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"`{param}` is no JSON: {error}. Give a JSON schema.", param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON schema: an object, true or false.", param)
    return StructuredOutputs("json_schema", _json_of(schema, param), any_whitespace, param)


def closed(schema: object) -> object:
    """Whoever names properties and does not say whether there may be others is taken to mean that there may not."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return schema  # json_schema() says what is wrong with it
    check_depth(schema, "structured_outputs.json")
    return _closed(schema)


def _closed(schema: object) -> object:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema or "patternProperties" in schema:
        inner.setdefault("additionalProperties", False)
    return inner


def json_object(param: str, *, any_whitespace: bool = True) -> StructuredOutputs:
    """Any JSON object."""
    return StructuredOutputs("json_object", "", any_whitespace, param)


def response_format(given: object, param: str) -> StructuredOutputs | None:
    """OpenAI's: {"type": "json_schema", "json_schema": {"name": …, "schema": …}}, json_object, or text: None."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"`{param}` must be an object with a `type`.", param)
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(f"`{param}.type` must be text, json_object or json_schema, not {kind!r:.80}.", param)
    _check_keys(given, ("type", "json_schema") if kind == "json_schema" else ("type",), param)
    if kind != "json_schema":
        return json_object(param) if kind == "json_object" else None
    inner = given.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        raise InvalidRequest(f"`{param}.json_schema` must be an object with `name` and `schema`.", param)
    _check_keys(inner, ("name", "description", "schema", "strict"), f"{param}.json_schema")
    for name, most_chars in (("name", MAX_LABEL_CHARS), ("description", MAX_DESCRIPTION_CHARS)):
        _check_words(inner.get(name), f"{param}.json_schema.{name}", most_chars)
    return json_schema(inner["schema"], f"{param}.json_schema.schema")


def as_response_format(given: StructuredOutputs) -> dict[str, object]:
    """What response_format() made it of."""
    if given.kind == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(given.source)}}


def regex(pattern: str, param: str) -> StructuredOutputs:
    return StructuredOutputs("regex", _check_text(pattern, param), param=param)


def choice(choices: Sequence[str], param: str) -> StructuredOutputs:
    """One of the texts, to the letter."""
    if not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequest(f"`{param}` must be a list of at least one text, none of them empty.", param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"`{param}` has {len(choices)} choices; at most {MAX_CHOICES}.", param)
    source = json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)
    return StructuredOutputs("choice", _check_size(source, param), param=param)


def grammar(text: str, param: str) -> StructuredOutputs:
    """In Lark (its start rule is `start`) or GBNF (`root`)."""
    return StructuredOutputs("grammar", _check_text(text, param), param=param)


def tagged(lark: str, parts: Sequence[JsonPart], param: str) -> StructuredOutputs:
    """lark: without the parts' rules."""
    for part in parts:
        _json_of(part.schema, part.where)
    source = json.dumps([lark, msgspec.to_builtins(parts)], ensure_ascii=False)
    return StructuredOutputs("tagged", _check_size(source, param), param=param)


def _json_of(schema: object, param: str) -> str:
    check_depth(schema, param)
    try:
        source = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"`{param}` holds NaN or Infinity, which JSON does not have.", param) from None
    return _check_size(source, param)


def _check_keys(given: dict[str, object], known: Sequence[str], param: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InvalidRequest(f"`{param}.{cut(unknown[0])}` is not known here; it may have {', '.join(known)}.", param)


def _check_words(text: object, param: str, most_chars: int) -> None:
    """Of what only people read."""
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"`{param}` must be a text.", param)
    if text is not None and len(text) > most_chars:
        raise InvalidRequest(f"`{param}` has {len(text)} characters; at most {most_chars}.", param)


def _check_text(text: str, param: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"`{param}` must be a text that is not empty.", param)
    return _check_size(text, param)


def _check_size(text: str, param: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` holds half of a surrogate pair, which is no text.", param) from None
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"`{param}` has {size} bytes; at most {MAX_SOURCE_BYTES}.", param)
    return text


def check_depth(value: object, param: str) -> None:
    """Raises InvalidRequest."""
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for one in level for inner in _inner(one)]
        if not level:
            return
    raise InvalidRequest(f"`{param}` is nested deeper than {MAX_JSON_DEPTH} levels; use $defs and $ref.", param)


def _inner(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
