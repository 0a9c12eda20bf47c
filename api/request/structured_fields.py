"""Declares the fields that constrain an answer to a schema, regex, grammar or choice."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from lorafleet.api.request.body_fields import LABEL_SCHEMA, NULL_SCHEMA, SOURCE_SCHEMA, Choices, Source, with_schema
from lorafleet.api.request.bounds import JSON_BOUNDS, AnyJSON
from lorafleet.api.request.fields import Strict
from lorafleet.protocol import limits

_SCHEMA_OBJECT = {"type": "object", "maxProperties": limits.MAX_JSON_VALUES, **JSON_BOUNDS}
_JSON_SCHEMA = [
    _SCHEMA_OBJECT,
    {"type": "boolean"},
    SOURCE_SCHEMA | {"description": "The same object as a JSON string."},
]
_FORMAT_SCHEMA = {
    "type": "object",
    "properties": {
        "name": LABEL_SCHEMA,
        "description": {"type": "string", "maxLength": limits.MAX_DESCRIPTION_CHARS},
        "schema": {"anyOf": _JSON_SCHEMA},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["schema"],
    "additionalProperties": False,
}
_TAG_TEXT = {"type": "string", "maxLength": limits.MAX_TAG_TEXT_CHARS}
_STRUCTURE = {
    "type": "object",
    "properties": {
        "begin": _TAG_TEXT,
        "schema": {"anyOf": [_SCHEMA_OBJECT, {"type": "boolean"}]},
        "end": _TAG_TEXT,
    },
    "required": ["begin", "schema", "end"],
    "additionalProperties": False,
}
_PARTS = ["const_string", "any_text", "json_schema", "tag", "sequence", "or", "triggered_tags", "tags_with_separator"]
_STRUCTURAL_FORMAT = _SCHEMA_OBJECT | {"properties": {"type": {"enum": _PARTS}}, "required": ["type"]}
_TRIGGERS = {"type": "array", "items": _TAG_TEXT, "minItems": 1, "maxItems": limits.MAX_TRIGGERS}
_RESPONSE_FORMATS = [
    {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object"]}},
        "required": ["type"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"type": {"const": "json_schema"}, "json_schema": _FORMAT_SCHEMA},
        "required": ["type", "json_schema"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "structural_tag"},
            "triggers": _TRIGGERS,
            "structures": {"type": "array", "items": _STRUCTURE, "minItems": 1, "maxItems": limits.MAX_TAGS},
        },
        "required": ["type", "triggers", "structures"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"type": {"const": "structural_tag"}, "format": _STRUCTURAL_FORMAT},
        "required": ["type", "format"],
        "additionalProperties": False,
    },
]

JSONSchema = Annotated[Any, AnyJSON(), with_schema(anyOf=[*_JSON_SCHEMA, NULL_SCHEMA])]
ResponseFormat = Annotated[Any, AnyJSON(), with_schema(anyOf=[*_RESPONSE_FORMATS, NULL_SCHEMA])]


class StructuredOutputsRequest(Strict):
    """The `structured_outputs` entry, as in vLLM."""

    json_: JSONSchema = Field(None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Source | None = None  # JSON text in the format of response_format.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # Has no effect: there is no other backend to fall back to.
