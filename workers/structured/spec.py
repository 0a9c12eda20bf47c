"""What an answer must look like, as a request says it: plain data that crosses to the engine in SamplingParams.

Made by the functions here, which check shape and size; whether a grammar can be served is found out where it is
compiled, workers/structured/compiler.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from lorafleet.workers.errors import InvalidRequest

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]

MAX_SOURCE_BYTES = 1 << 20
MAX_CHOICES = 10_000
MAX_DEPTH = 64  # of a schema's JSON, over which compilers that recurse are not asked


class StructuredOutputs(msgspec.Struct, frozen=True):
    """The whole answer must match. Two that are equal but for `param` compile to the same.

    source: the schema's JSON text, whose order of properties the answer follows; the regex; the choices as a JSON list;
    the grammar in Lark or GBNF; "" of json_object.
    any_whitespace: of JSON: whether the model may lay it out; False: one line with ", " and ": " between.
    param: the request's field that asked for it, which errors name.
    """

    kind: Kind
    source: str = ""
    any_whitespace: bool = True
    param: str = "structured_outputs"


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
    _check_depth(schema, param)
    try:
        source = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(f"`{param}` holds NaN or Infinity, which JSON does not have.", param) from None
    return StructuredOutputs("json_schema", _check_size(source, param), any_whitespace, param)


def json_object(param: str, *, any_whitespace: bool = True) -> StructuredOutputs:
    """Any JSON object."""
    return StructuredOutputs("json_object", "", any_whitespace, param)


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


def _check_depth(value: object, param: str) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inner(one)]
        if not level:
            return
    raise InvalidRequest(f"`{param}` is nested deeper than {MAX_DEPTH} levels; use $defs and $ref.", param)


def _inner(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
