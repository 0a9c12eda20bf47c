"""Checks chat messages and converts them to what chat templates expect: a role, a text and a few other fields."""

from __future__ import annotations

import json
from typing import Any

from lorafleet.api.request.bounds import JSON_BOUNDS, fault_of_json, json_schema
from lorafleet.api.tool_calls.custom_input import arguments_of
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import (
    MAX_CALL_CHARS,
    MAX_JSON_TEXT_CHARS,
    MAX_JSON_VALUES,
    MAX_LABEL_CHARS,
    MAX_PARTS,
    MAX_PARTS_OF_ONE,
    MAX_TEXT_CHARS,
    MAX_TOOL_NAME_CHARS,
    cut,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_LISTED = ("content", "tool_calls")
_PASSED_ON = ("role", "name", "tool_call_id")
# What libraries add to an earlier answer and send back: openai-python's parsed `content`, IDs and states of items of
# other APIs, and marks of what to cache. None of it can change the prompt.
_NO_EFFECT = ("parsed", "id", "status", "cache_control", "provider_specific_fields")
_TEXT_PARTS = ("text", "input_text", "output_text")  # /v1/responses has the other two names for the same.
_NO_EFFECT_IN_PARTS = ("prompt_cache_breakpoint", "cache_control", "annotations", "logprobs", "id")
_MAY_BE_NULL = ("assistant", "tool", "function")  # Roles whose content may be null, which is no text.
_ALWAYS_EMPTY = ("function_call", "refusal", "audio", "annotations")
# Names of an earlier answer's reasoning in clients' messages. Templates read it by one of the other names.
_REASONING = ("reasoning_content", "reasoning")
_REASONING_IN_TEMPLATES = ("reasoning_content", "reasoning", "thinking")

_IGNORED = json_schema(MAX_JSON_TEXT_CHARS) | {"description": "Accepted, but has no effect."}
_LABEL = {"type": "string", "maxLength": MAX_LABEL_CHARS}
_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_NULL = {"type": "null"}
_PARTS = {
    "type": "array",
    "maxItems": MAX_PARTS_OF_ONE,
    "items": {
        "type": "object",
        "properties": {
            "type": {"enum": list(_TEXT_PARTS)},
            "text": _TEXT,
            **dict.fromkeys(_NO_EFFECT_IN_PARTS, _IGNORED),
        },
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}
_MORE = {"maxProperties": MAX_JSON_VALUES, **JSON_BOUNDS}  # Some clients send back more fields of a call.
_CUSTOM_CALL = {
    "type": "object",
    "properties": {
        "id": {"anyOf": [_LABEL, _NULL]},
        "type": {"const": "custom"},
        "custom": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": MAX_TOOL_NAME_CHARS},
                "input": {"type": "string", "maxLength": MAX_CALL_CHARS},
            },
            "required": ["name", "input"],
            **_MORE,
        },
    },
    "required": ["type", "custom"],
    **_MORE,
}
_FUNCTION_CALL = {
    "type": "object",
    "properties": {
        "id": {"anyOf": [_LABEL, _NULL]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": MAX_TOOL_NAME_CHARS},
                "arguments": {"type": "string", "maxLength": MAX_CALL_CHARS},
            },
            "required": ["name", "arguments"],
            **_MORE,
        },
    },
    "required": ["function"],
    **_MORE,
}
_CALL = {"anyOf": [_FUNCTION_CALL, _CUSTOM_CALL]}
_TEXT_OR_PARTS = [_TEXT, _PARTS]
# The accepted messages, for /openapi.json.
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [*_TEXT_OR_PARTS, _NULL]},
        "name": {"anyOf": [_LABEL, _NULL]},
        "tool_call_id": {"anyOf": [_LABEL, _NULL]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL, "maxItems": MAX_PARTS_OF_ONE}, _NULL]},
        **{name: {"anyOf": [_TEXT, _NULL]} for name in _REASONING},
        **{name: {"enum": [None, "", [], {}]} for name in _ALWAYS_EMPTY},
        **dict.fromkeys(_NO_EFFECT, _IGNORED),
    },
    "required": ["role"],
    "if": {"not": {"properties": {"role": {"enum": list(_MAY_BE_NULL)}}}},
    "then": {"properties": {"content": {"anyOf": _TEXT_OR_PARTS}}, "required": ["content"]},
    "additionalProperties": False,
}


def read_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not given:
        raise InvalidRequest("`messages` is empty; give at least one message.", "messages")
    num_parts = sum(len(message[name]) for message in given for name in _LISTED if isinstance(message.get(name), list))
    if num_parts > MAX_PARTS:
        raise InvalidRequest(
            f"`messages` has {num_parts} content parts and tool calls in total; at most {MAX_PARTS} are allowed. Join "
            "text parts.",
            "messages",
        )
    return [_read_message(message, f"messages.{i}") for i, message in enumerate(given)]


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in message.items():
        if name in _ALWAYS_EMPTY:
            if value is not None and value not in ("", [], {}):
                raise InvalidRequest(f"`{where}.{name}` is not supported by this server; remove it.", f"{where}.{name}")
        elif name in _PASSED_ON:
            if value is not None:
                read[name] = string(value, f"{where}.{name}", MAX_LABEL_CHARS)
        elif name == "tool_calls":
            if value:
                read[name] = _read_calls(value, f"{where}.{name}")
        elif name in _REASONING:
            if value is not None and value != "":
                reasoning = string(value, f"{where}.{name}", MAX_TEXT_CHARS)
                if read.setdefault(_REASONING_IN_TEMPLATES[0], reasoning) != reasoning:
                    raise InvalidRequest(f"`{where}` has two texts of reasoning; remove one.", f"{where}.{name}")
                read |= dict.fromkeys(_REASONING_IN_TEMPLATES, reasoning)
        elif name in _NO_EFFECT:
            check_ignored(value, f"{where}.{name}")
        elif name != "content":
            field = f"{where}.{cut(name)}"
            raise InvalidRequest(f"`{field}` is not a field of a message; remove it.", field)
    if read.get("role") not in ROLES:
        raise InvalidRequest(f"`{where}.role` must be one of {', '.join(ROLES)}.", f"{where}.role")
    if "tool_calls" in read and read["role"] != "assistant":
        raise InvalidRequest(
            f"`{where}.tool_calls` is allowed only in messages of the assistant; remove it.", f"{where}.tool_calls"
        )
    if _REASONING_IN_TEMPLATES[0] in read and read["role"] != "assistant":
        field = f"{where}.{_REASONING_IN_TEMPLATES[0]}"
        raise InvalidRequest(f"`{field}` is allowed only in messages of the assistant; remove it.", field)
    read["content"] = _read_content(message.get("content"), read["role"], f"{where}.content")
    return read


def _read_calls(given: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise InvalidRequest(f"`{where}` must be a list of tool calls.", where)
    _check_count(given, where)
    return [_read_call(call, f"{where}.{i}") for i, call in enumerate(given)]


def _read_call(call: object, where: str) -> dict[str, Any]:
    """Reads one tool call. Its arguments become an object, because templates serialize them themselves. A call of a
    custom tool becomes one of the function in its place."""
    if isinstance(call, dict) and call.get("type") == "custom":
        call = _as_function_call(call, where)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(
            f"`{where}` must be a function call, with a `function` that has a name and arguments.", where
        )
    check_ignored(call, where)
    read: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        read["id"] = string(call["id"], f"{where}.id", MAX_LABEL_CHARS)
    name = string(function.get("name"), f"{where}.function.name", MAX_TOOL_NAME_CHARS)
    arguments = _read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return read | {"function": {"name": name, "arguments": arguments}}


def _as_function_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    custom = call.get("custom")
    if not isinstance(custom, dict):
        raise InvalidRequest(f"`{where}` must have a `custom` with a name and an input.", where)
    given = string(custom.get("input"), f"{where}.custom.input", MAX_CALL_CHARS)
    name = string(custom.get("name"), f"{where}.custom.name", MAX_TOOL_NAME_CHARS)
    others = {key: value for key, value in call.items() if key != "custom"}
    return others | {"type": "function", "function": {"name": name, "arguments": arguments_of(given)}}


def _read_arguments(given: object, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(string(given, where, MAX_CALL_CHARS) or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"`{where}` must be a string that contains a JSON object.", where)
    check_ignored(arguments, where)
    return arguments


def _read_content(content: object, role: str, where: str) -> str | list[str]:
    """Returns the text, or the texts of a list of parts. The chat template decides whether these are joined."""
    if isinstance(content, str):
        return string(content, where, MAX_TEXT_CHARS)
    if content is None and role in _MAY_BE_NULL:
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"`{where}` must be a string or a list of text parts.", where)
    _check_count(content, where)
    return [_read_part(part, f"{where}.{i}") for i, part in enumerate(content)]


def _read_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return string(part, where, MAX_TEXT_CHARS)
    if not isinstance(part, dict) or "type" not in part:
        raise InvalidRequest(f"`{where}` must be an object with a type.", where)
    if part["type"] not in _TEXT_PARTS:
        raise InvalidRequest(
            f"`{where}` has the type {cut(repr(part['type']))}, but this model reads text only. Remove the part.",
            f"{where}.type",
        )
    unknown = set(part) - {"type", "text", *_NO_EFFECT_IN_PARTS}
    if unknown:
        field = f"{where}.{cut(min(unknown))}"
        raise InvalidRequest(f"`{field}` is not a field of a text part; remove it.", field)
    for name in _NO_EFFECT_IN_PARTS:
        check_ignored(part.get(name), f"{where}.{name}")
    return string(part.get("text"), f"{where}.text", MAX_TEXT_CHARS)


def string(value: object, where: str, most_chars: int) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"`{where}` must be a string.", where)
    if len(value) > most_chars:
        raise InvalidRequest(f"`{where}` has {len(value)} characters; at most {most_chars} are allowed.", where)
    return value


def check_ignored(value: object, where: str) -> None:
    """Checks the bounds of a value that is ignored, or whose shape only the model knows. Raises InvalidRequest."""
    fault = None if value is None else fault_of_json(value, MAX_JSON_TEXT_CHARS)
    if fault is not None:
        raise InvalidRequest(f"`{where}` {fault}.", where)


def _check_count(given: list[object], where: str) -> None:
    if len(given) > MAX_PARTS_OF_ONE:
        raise InvalidRequest(f"`{where}` has {len(given)} entries; at most {MAX_PARTS_OF_ONE} are allowed.", where)
