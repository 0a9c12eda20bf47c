"""The format that a request demands of its answer: plain data that crosses to the engine in SamplingParams.

The functions here create it and check shape and size. Whether a grammar can be served is found out when
workers/structured/grammar_program.py compiles it.
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
from lorafleet.protocol.outside.text_budget import TextBudget

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tagged"]

# The entry in an adapter's folder that gives the format of its answers.
ADAPTERS_DEFAULT = "lorafleet.json: response_format"


class StructuredOutputs(msgspec.Struct, frozen=True):
    """A format that the whole answer must match. Two that differ only in `param` compile to the same grammar."""

    kind: Kind
    # json_schema: the schema's JSON text; the answer follows its order of properties.
    # json_object: "".
    # regex: the expression.
    # choice: the choices as a JSON list.
    # grammar: the grammar in Lark or GBNF.
    # tagged: text that may contain JSON of several schemas, each of them a rule of the Lark grammar. The source is the
    #     JSON of [Lark, [[rule, schema, where, any_whitespace], …]].
    source: str = ""
    any_whitespace: bool = True  # For JSON: whether the model may add whitespace. False: no blanks outside of strings.
    param: str = "structured_outputs"  # The request's field that asked for the format, for error messages.


class JsonPart(msgspec.Struct, frozen=True, array_like=True):
    """A JSON schema that is a rule of a tagged grammar."""

    rule: str
    schema: dict[str, Any] | bool
    where: str  # The request's field that has the schema, for error messages.
    any_whitespace: bool = True


def json_schema(schema: object, param: str, *, any_whitespace: bool = True) -> StructuredOutputs:
    """Returns the format for a schema, which is given as a parsed value or as text. true and false are schemas too."""
    if isinstance(schema, str):
        _check_size(schema, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"`{param}` is not valid JSON: {error}. Give a JSON schema.", param) from None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON schema: an object, true or false.", param)
    return StructuredOutputs("json_schema", _json_of(schema, param), any_whitespace, param)


def closed(schema: object) -> object:
    """Forbids additional properties in every object schema that names properties and does not say whether others are
    allowed."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return schema  # json_schema() reports the error
    check_depth(schema, "structured_outputs.json")
    return _closed(schema)


def _closed(schema: object) -> object:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    if "properties" in schema or "patternProperties" in schema:
        inner.setdefault("additionalProperties", False)
    return inner


def json_object(param: str, *, any_whitespace: bool = True) -> StructuredOutputs:
    """Returns the format of any JSON object."""
    return StructuredOutputs("json_object", "", any_whitespace, param)


def response_format(given: object, param: str) -> StructuredOutputs | None:
    """Returns the format for OpenAI's `response_format`: json_object, or {"type": "json_schema", "json_schema":
    {"name": …, "schema": …}}. Returns None for the type text."""
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
    """Returns the argument that response_format() turns into this format."""
    if given.kind == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": json.loads(given.source)}}


def regex(pattern: str, param: str) -> StructuredOutputs:
    return StructuredOutputs("regex", _check_text(pattern, param), param=param)


def choice(choices: Sequence[str], param: str) -> StructuredOutputs:
    """Requires the answer to be exactly one of the texts."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest(f"`{param}` must be a list of at least one string, and none may be empty.", param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"`{param}` has {len(choices)} choices; at most {MAX_CHOICES} are allowed.", param)
    TextBudget(param, what="as JSON").value(list(choices), param)
    source = json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)
    return StructuredOutputs("choice", _check_size(source, param), param=param)


def grammar(text: str, param: str) -> StructuredOutputs:
    """Returns the format for a grammar in Lark (its start rule is `start`) or GBNF (`root`)."""
    return StructuredOutputs("grammar", _check_text(text, param), param=param)


def tagged(lark: str, parts: Sequence[JsonPart], param: str) -> StructuredOutputs:
    """Returns the format for a Lark grammar that lacks the rules of the parts.

    All parts are counted before any is written, since several may share one large value, such as the definitions of a
    schema.
    """
    budget = TextBudget(param)
    budget.text(lark)
    for part in parts:
        budget.value(part.schema, part.where)
    source = _dumped([lark, msgspec.to_builtins(parts)], param)
    return StructuredOutputs("tagged", _check_size(source, param), param=param)


def _json_of(schema: object, param: str) -> str:
    TextBudget(param, what="as JSON").value(schema, param)
    return _check_size(_dumped(schema, param), param)


def _dumped(value: object, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"`{param}` holds NaN or Infinity, which JSON does not have.", param) from None


def _check_keys(given: dict[str, object], known: Sequence[str], param: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InvalidRequest(
            f"`{param}.{cut(unknown[0])}` is unknown; only {', '.join(known)} are allowed here.", param
        )


def _check_words(text: object, param: str, most_chars: int) -> None:
    """Checks a text that only people read."""
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"`{param}` must be a string.", param)
    if text is not None and len(text) > most_chars:
        raise InvalidRequest(f"`{param}` has {len(text)} characters; at most {most_chars} are allowed.", param)


def _check_text(text: str, param: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"`{param}` must be a string that is not empty.", param)
    return _check_size(text, param)


def _check_size(text: str, param: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{param}` holds half of a surrogate pair, which is not valid text.", param) from None
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"`{param}` has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed.", param)
    return text


def check_depth(value: object, param: str) -> None:
    """Raises InvalidRequest if the value is nested too deeply."""
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise InvalidRequest(f"`{param}` is nested deeper than {MAX_JSON_DEPTH} levels; use $defs and $ref.", param)


def _inner(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
