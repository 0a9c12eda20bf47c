"""Finds the adapter that a request names, in its body, which may have been cut off.

Only routing depends on it: a name that is not found, or wrongly guessed, costs a load on another replica, never a wrong
answer, since every replica reads the whole request by itself.
"""

from __future__ import annotations

import json
import re

SMALL = 4096  # bytes; up to here json.loads is the quickest scanner
NAMING_KEYS = ("lora_path", "model")  # SGLang's /generate has the first; it wins where a body has both

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SKIP = re.compile(rb"[^\"{}\[\]]*")


def find_adapter(body: bytes) -> str:
    """The adapter's name, or "" where none is found. `base:adapter` gives the adapter."""
    found = _parse(body) if len(body) <= SMALL else None
    if found is None:
        found = scan(body)
    name = next((found[key] for key in NAMING_KEYS if found.get(key)), "")
    return name.rpartition(":")[2] or name


def _parse(body: bytes) -> dict[str, str] | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    if not isinstance(document, dict):
        return {}
    inner = document.get("sampling_params")
    if isinstance(inner, dict) and "lora_path" not in document:
        document["lora_path"] = inner.get("lora_path")
    return {key: document[key] for key in NAMING_KEYS if isinstance(document.get(key), str)}


def scan(body: bytes) -> dict[str, str]:
    """The naming keys at the top level of a JSON object of which only a beginning may be there.

    Steps from string to string and bracket to bracket, so that a long prompt is one match of a regular expression.
    """
    found: dict[str, str] = {}
    depth, position, key = 0, 0, ""
    while True:
        position = _SKIP.match(body, position).end()  # type: ignore[union-attr]  # it matches the empty string too
        if position >= len(body):
            return found
        if body[position] != ord('"'):
            depth += 1 if body[position] in b"{[" else -1
            position += 1
            continue
        text = _STRING.match(body, position)
        if text is None:  # cut off within this string
            return found
        if depth == 1 and _precedes(body, position, b":"):
            if key in NAMING_KEYS:
                found[key] = _decode(text.group())
            if "lora_path" in found:
                return found
        key = _decode(text.group()) if depth == 1 and text.end() - position <= 16 else ""
        position = text.end()


def _precedes(body: bytes, position: int, wanted: bytes) -> bool:
    """Whether `wanted` is the last byte before `position` that is no white space."""
    return body[max(0, position - 64) : position].rstrip().endswith(wanted)


def _decode(text: bytes) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return ""
