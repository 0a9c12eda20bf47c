"""Checks chat messages and makes them what chat templates expect: a role, a text, and few other names."""

from __future__ import annotations

import json
from typing import Any

from lorafleet.workers.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PASSED_ON = ("role", "name", "tool_call_id")
_NO_EFFECT = ("parsed",)  # openai-python's own reading of `content`, which it sends back beside it
_ALWAYS_EMPTY = ("function_call", "refusal", "audio", "annotations", "reasoning", "reasoning_content")

_PARTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}, "prompt_cache_breakpoint": {}},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
_TEXT_OR_PARTS = [{"type": "string"}, _PARTS]
# What is taken here, for /openapi.json.
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [*_TEXT_OR_PARTS, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        **{name: {"enum": [None, "", [], {}]} for name in _ALWAYS_EMPTY},
        **{name: {"description": "Accepted; it changes nothing."} for name in _NO_EFFECT},
    },
    "required": ["role"],
    "if": {"not": {"properties": {"role": {"const": "assistant"}}}},
    "then": {"properties": {"content": {"anyOf": _TEXT_OR_PARTS}}, "required": ["content"]},
    "additionalProperties": False,
}


def read_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not given:
        raise InvalidRequest("`messages` is empty; give at least one message.", "messages")
    return [_read_message(message, f"messages.{i}") for i, message in enumerate(given)]


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in message.items():
        if name in _ALWAYS_EMPTY:
            if value is not None and value not in ("", [], {}):
                raise InvalidRequest(f"`{where}.{name}` is not supported by this server; remove it.", f"{where}.{name}")
        elif name in _PASSED_ON:
            if value is not None:
                read[name] = _string(value, f"{where}.{name}")
        elif name == "tool_calls":
            if value:
                read[name] = _read_calls(value, f"{where}.{name}")
        elif name != "content" and name not in _NO_EFFECT:
            raise InvalidRequest(f"`{where}.{name}` is no field of a message; remove it.", f"{where}.{name}")
    if read.get("role") not in ROLES:
        raise InvalidRequest(f"`{where}.role` must be one of {', '.join(ROLES)}.", f"{where}.role")
    if "tool_calls" in read and read["role"] != "assistant":
        raise InvalidRequest(f"`{where}.tool_calls` is the assistant's alone; remove it.", f"{where}.tool_calls")
    read["content"] = _read_content(message.get("content"), read["role"], f"{where}.content")
    return read


def _read_calls(given: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise InvalidRequest(f"`{where}` must be a list of calls.", where)
    return [_read_call(call, f"{where}.{i}") for i, call in enumerate(given)]


def _read_call(call: object, where: str) -> dict[str, Any]:
    """Its arguments as an object: templates write them out themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f"`{where}` must be a call of a function, with a `function` of name and arguments.", where)
    read: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        read["id"] = _string(call["id"], f"{where}.id")
    name = _string(function.get("name"), f"{where}.function.name")
    arguments = _read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return read | {"function": {"name": name, "arguments": arguments}}


def _read_arguments(given: object, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(_string(given, where) or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"`{where}` must be a JSON object, as text.", where)
    return arguments


def _read_content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"`{where}` must be a string or a list of text parts.", where)
    return "\n".join(_read_part(part, f"{where}.{i}") for i, part in enumerate(content))


def _read_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or "type" not in part:
        raise InvalidRequest(f"`{where}` must be an object with a type.", where)
    if part["type"] != "text":
        raise InvalidRequest(
            f"`{where}` is of type {part['type']!r}; this model reads text only. Remove the part.", f"{where}.type"
        )
    unknown = set(part) - {"type", "text", "prompt_cache_breakpoint"}
    if unknown:
        raise InvalidRequest(
            f"`{where}.{min(unknown)}` is no field of a text part; remove it.", f"{where}.{min(unknown)}"
        )
    return _string(part.get("text"), f"{where}.text")


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"`{where}` must be a string.", where)
    return value
