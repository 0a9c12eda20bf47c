"""The input of /v1/responses as chat messages: a text, or items that are messages, calls and their results."""

from __future__ import annotations

from typing import Any

from lorafleet.workers.errors import InvalidRequest

_TEXT_PARTS = ("input_text", "output_text", "text")
_NO_EFFECT = ("annotations", "logprobs", "prompt_cache_breakpoint")
_PART: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": list(_TEXT_PARTS)},
        "text": {"type": "string"},
        **{name: {"description": "Accepted; it changes nothing."} for name in _NO_EFFECT},
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
_STATE = {"id": {"type": ["string", "null"]}, "status": {"type": ["string", "null"]}}


def _item(kind: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **_STATE, **properties},
        "required": required,
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_TEXT_OR_PARTS = {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}
_PHASE = {"enum": ["commentary", "final_answer", None], "description": "Accepted; it changes nothing."}
# What is taken here, for /openapi.json.
ITEM_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _item(
            "message",
            ["role", "content"],
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_TEXT_OR_PARTS,
            phase=_PHASE,
        ),
        _item("function_call", ["type", "call_id", "name", "arguments"], call_id=_TEXT, name=_TEXT, arguments=_TEXT),
        _item("function_call_output", ["type", "call_id", "output"], call_id=_TEXT, output=_TEXT_OR_PARTS),
    ]
}
_FIELDS = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
}


def messages_of(given: object, instructions: str | None) -> list[dict[str, Any]]:
    """instructions: a system message before all others."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("`input` must be a string, or a list of messages, calls and their results.", "input")
    for i, item in enumerate(given):
        _add(messages, item, f"input.{i}")
    return messages


def _add(messages: list[dict[str, Any]], item: object, where: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(kind, str) or kind not in _FIELDS:
        raise InvalidRequest(f"`{where}` must be an item of type {', '.join(_FIELDS)}.", f"{where}.type")
    unknown = {name for name, value in item.items() if value is not None} - _FIELDS[kind] - {"type", "id", "status"}
    if unknown:
        raise InvalidRequest(f"`{where}.{min(unknown)}` is no field of a {kind}; remove it.", f"{where}.{min(unknown)}")
    if kind == "message":
        messages.append({"role": _text(item, "role", where), "content": _content(item, "content", where)})
    elif kind == "function_call_output":
        output, call_id = _content(item, "output", where), _text(item, "call_id", where)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    else:
        _add_call(messages, item, where)


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Calls in a row, and a text before them, are one message of the assistant."""
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(item: dict[str, Any], name: str, where: str) -> object:
    given = item.get(name)
    if not isinstance(given, list):
        return _text(item, name, where)
    parts: list[dict[str, str]] = []
    for i, part in enumerate(given):
        place = f"{where}.{name}.{i}"
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            raise InvalidRequest(
                f"`{place}` is no text, which is all that this model reads; remove it.", f"{place}.type"
            )
        unknown = set(part) - {"type", "text", *_NO_EFFECT}
        if unknown:
            raise InvalidRequest(
                f"`{place}.{min(unknown)}` is no field of a text; remove it.", f"{place}.{min(unknown)}"
            )
        parts.append({"type": "text", "text": _text(part, "text", place)})
    return parts


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"`{where}.{name}` must be a string.", f"{where}.{name}")
    return value
