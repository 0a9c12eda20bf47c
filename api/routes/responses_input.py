"""Converts the input of /v1/responses to chat messages: a text, or items that are messages, calls and their results."""

from __future__ import annotations

from typing import Any

from lorafleet.api.request.bounds import json_schema
from lorafleet.api.request.chat_messages import check_ignored, string
from lorafleet.api.request.packed_reasoning import MAX_PACKED_CHARS, unpacked
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import (
    MAX_CALL_CHARS,
    MAX_JSON_TEXT_CHARS,
    MAX_LABEL_CHARS,
    MAX_MESSAGES,
    MAX_PARTS_OF_ONE,
    MAX_TEXT_CHARS,
    MAX_TOOL_NAME_CHARS,
    cut,
)

_TEXT_PARTS = ("input_text", "output_text", "text")
_NO_EFFECT = ("annotations", "logprobs", "prompt_cache_breakpoint")
_IGNORED = json_schema(MAX_JSON_TEXT_CHARS) | {"description": "Accepted, but has no effect."}
_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_LABEL = {"type": "string", "maxLength": MAX_LABEL_CHARS}
_TOOL_NAME = {"type": "string", "maxLength": MAX_TOOL_NAME_CHARS}
_ARGUMENTS = {"type": "string", "maxLength": MAX_CALL_CHARS}
_PART: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": list(_TEXT_PARTS)},
        "text": _TEXT,
        **dict.fromkeys(_NO_EFFECT, _IGNORED),
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
_STATE = {name: {"anyOf": [_LABEL, {"type": "null"}]} for name in ("id", "status")}


def _item(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **_STATE, **properties},
        "required": required,
        "additionalProperties": False,
    }


_PARTS = {"type": "array", "items": _PART, "minItems": 1, "maxItems": MAX_PARTS_OF_ONE}
_TEXT_OR_PARTS = {"anyOf": [_TEXT, _PARTS]}
_REASONING_KINDS = ("reasoning_text", "summary_text")
_REASONING_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_REASONING_KINDS)}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_REASONING_PARTS = {
    "anyOf": [{"type": "array", "items": _REASONING_PART, "maxItems": MAX_PARTS_OF_ONE}, {"type": "null"}]
}
_PHASE = {"enum": ["commentary", "final_answer", None], "description": "Accepted, but has no effect."}
# The accepted items, for /openapi.json.
ITEM_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _item(
            "message",
            ["role", "content"],
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_TEXT_OR_PARTS,
            phase=_PHASE,
        ),
        _item(
            "function_call",
            ["type", "call_id", "name", "arguments"],
            call_id=_LABEL,
            name=_TOOL_NAME,
            arguments=_ARGUMENTS,
        ),
        _item(
            "reasoning",
            ["type"],
            summary=_REASONING_PARTS,
            content=_REASONING_PARTS,
            encrypted_content={"anyOf": [{"type": "string", "maxLength": MAX_PACKED_CHARS}, {"type": "null"}]},
        ),
        _item("function_call_output", ["type", "call_id", "output"], call_id=_LABEL, output=_TEXT_OR_PARTS),
        _item(
            "custom_tool_call", ["type", "call_id", "name", "input"], call_id=_LABEL, name=_TOOL_NAME, input=_ARGUMENTS
        ),
        _item("custom_tool_call_output", ["type", "call_id", "output"], call_id=_LABEL, output=_TEXT_OR_PARTS),
    ]
}
_FIELDS = {
    "message": {"role", "content", "phase"},
    "reasoning": {"summary", "content", "encrypted_content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "custom_tool_call": {"call_id", "name", "input"},
    "custom_tool_call_output": {"call_id", "output"},
}


def messages_of(given: object, instructions: str | None) -> list[dict[str, Any]]:
    """Returns the input as chat messages. `instructions` become a system message before all others."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest(
            "`input` must be a string, or a list of messages, function calls and their results.", "input"
        )
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest(f"`input` has {len(given)} items; at most {MAX_MESSAGES} are allowed.", "input")
    for i, item in enumerate(given):
        _add(messages, item, f"input.{i}")
    return messages


def _add(messages: list[dict[str, Any]], item: object, where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(kind, str) or kind not in _FIELDS:
        raise InvalidRequest(f"`{where}` must be an item of type {', '.join(_FIELDS)}.", f"{where}.type")
    unknown = {name for name, value in item.items() if value is not None} - _FIELDS[kind] - {"type", "id", "status"}
    if unknown:
        field = f"{where}.{cut(min(unknown))}"
        raise InvalidRequest(f"`{field}` is not a field of a {kind}; remove it.", field)
    for name in _STATE:
        if item.get(name) is not None:
            string(item[name], f"{where}.{name}", MAX_LABEL_CHARS)
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "reasoning":
        messages.append({"role": "assistant", "content": "", "reasoning_content": _reasoning(item, where)})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output, call_id = _content(item, "output", where), _text(item, "call_id", where, MAX_LABEL_CHARS)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    else:
        _add_call(messages, item, where)


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Adds one message to the others. The assistant's reasoning before it becomes a part of it."""
    role, content = _text(item, "role", where, MAX_LABEL_CHARS), _content(item, "content", where)
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("content") == "" and "reasoning_content" in last and "tool_calls" not in last:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Returns the text of an item of reasoning: its content, or else its packed text, or else its summary."""
    texts: list[str] = []
    for name in ("content", "summary"):
        given = item.get(name) or []
        if not isinstance(given, list) or len(given) > MAX_PARTS_OF_ONE:
            raise InvalidRequest(
                f"`{where}.{name}` must be a list of at most {MAX_PARTS_OF_ONE} texts of reasoning.", f"{where}.{name}"
            )
        found = []
        for i, part in enumerate(given):
            place = f"{where}.{name}.{i}"
            if not isinstance(part, dict) or part.get("type") not in _REASONING_KINDS or set(part) != {"type", "text"}:
                raise InvalidRequest(f"`{place}` must be a part of type {' or '.join(_REASONING_KINDS)}.", place)
            found.append(_text(part, "text", place, MAX_TEXT_CHARS))
        texts.append("\n".join(found))
    packed = item.get("encrypted_content")
    whole = "" if packed is None else unpacked(packed, f"{where}.encrypted_content")
    return texts[0] or whole or texts[1]


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Adds a call to the messages. Consecutive calls and a text before them become one message of the assistant."""
    name = _text(item, "name", where, MAX_TOOL_NAME_CHARS)
    call: dict[str, Any] = {"id": _text(item, "call_id", where, MAX_LABEL_CHARS)}
    if item["type"] == "custom_tool_call":
        call |= {"type": "custom", "custom": {"name": name, "input": _text(item, "input", where, MAX_CALL_CHARS)}}
    else:
        arguments = _text(item, "arguments", where, MAX_CALL_CHARS)
        call |= {"type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(item: dict[str, Any], name: str, where: str) -> object:
    given = item.get(name)
    if not isinstance(given, list):
        return _text(item, name, where, MAX_TEXT_CHARS)
    if len(given) > MAX_PARTS_OF_ONE:
        raise InvalidRequest(
            f"`{where}.{name}` has {len(given)} entries; at most {MAX_PARTS_OF_ONE} are allowed.", f"{where}.{name}"
        )
    parts: list[dict[str, str]] = []
    for i, part in enumerate(given):
        place = f"{where}.{name}.{i}"
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise InvalidRequest(f"`{place}` is not text, and this model reads text only; remove it.", f"{place}.type")
        unknown = set(part) - {"type", "text", *_NO_EFFECT}
        if unknown:
            field = f"{place}.{cut(min(unknown))}"
            raise InvalidRequest(f"`{field}` is not a field of a text part; remove it.", field)
        for ignored in _NO_EFFECT:
            check_ignored(part.get(ignored), f"{place}.{ignored}")
        parts.append({"type": "text", "text": _text(part, "text", place, MAX_TEXT_CHARS)})
    return parts


def _text(item: dict[str, Any], name: str, where: str, most_chars: int) -> str:
    return string(item.get(name), f"{where}.{name}", most_chars)
