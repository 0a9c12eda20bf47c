"""Finds the adapter that a request names in its body. Parts of the body may be missing.

Only routing depends on the name. A name that is not found, or is guessed wrongly, costs affinity but never gives a
wrong answer, since every replica reads the whole request by itself. The body comes from outside, so the work is
bounded: no loop in Python runs over its bytes, and at most WHOLE_BYTES of it are parsed.
"""

from __future__ import annotations

import re

import msgspec

from lorafleet.protocol.names import MAX_NAME_CHARS

WHOLE_BYTES = 1 << 17  # Bodies up to this size are parsed whole, in 0.4 ms for the worst one and 0.05 ms usually.
END_BYTES = 1 << 15  # Larger bodies are searched in this many bytes at each end.
MAX_LOOKS = 64  # Occurrences of a key that are examined at each end.
MAX_TRIES = 2  # Occurrences with a string as their value, whose depth in the document is determined.

_VALUE = re.compile(rb'\s*+:\s*+"')
_KEYS = (b'"lora_path"', b'"model"')  # SGLang's /generate has the first; it wins if a body has both.


class _SamplingParams(msgspec.Struct):
    lora_path: msgspec.Raw = msgspec.Raw()


class _Named(msgspec.Struct):
    """The fields that can name an adapter. They stay unparsed, so that a wrong type in one does not hide the other."""

    lora_path: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    sampling_params: msgspec.Raw = msgspec.Raw()


_named = msgspec.json.Decoder(_Named)
_sampling_params = msgspec.json.Decoder(_SamplingParams)
_text = msgspec.json.Decoder(str)


def find_adapter(body: bytes) -> str:
    """Returns the adapter's name, or "" if none is found. For `base:adapter` it returns `adapter`."""
    named = _parse(body) if len(body) <= WHOLE_BYTES else None
    if named is not None:
        candidates = (named.lora_path or _inner_path(named.sampling_params), named.model)
        name = next(filter(None, map(_decode, candidates)), "")
    else:
        name = next(filter(None, (_find_in_beginning(body, key) or _find_in_end(body, key) for key in _KEYS)), "")
    return name.rpartition(":")[2] or name


def _parse(json: bytes) -> _Named | None:
    try:
        return _named.decode(json)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _inner_path(sampling_params: msgspec.Raw) -> msgspec.Raw:
    """Returns the lora_path within sampling_params, where SGLang accepts it too."""
    try:
        return _sampling_params.decode(sampling_params).lora_path
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return msgspec.Raw()


def _find_in_beginning(body: bytes, key: bytes) -> str:
    """Searches the beginning of the body. A key is at the top level if the text before it, with one more member, is
    an object."""
    head = body[:END_BYTES]
    for start in _places(head, key, last_first=False):
        if _parse(head[:start] + b'"":0}') is not None:
            return _string_after(head, start + len(key))
    return ""


def _find_in_end(body: bytes, key: bytes) -> str:
    """Searches the end of the body. A key is at the top level if it and all the text after it are the rest of an
    object."""
    tail = body[-END_BYTES:]
    for start in _places(tail, key, last_first=True):
        if _parse(b"{" + tail[start:]) is not None:
            return _string_after(tail, start + len(key))
    return ""


def _places(text: bytes, key: bytes, *, last_first: bool) -> list[int]:
    """Returns the first MAX_TRIES positions, among MAX_LOOKS occurrences, where the key is followed by a string."""
    found: list[int] = []
    low, high = 0, len(text)
    for _ in range(MAX_LOOKS):
        start = text.rfind(key, low, high) if last_first else text.find(key, low, high)
        if start < 0 or len(found) == MAX_TRIES:
            break
        if _VALUE.match(text, start + len(key)):
            found.append(start)
        low, high = (low, start) if last_first else (start + len(key), high)
    return found


def _string_after(text: bytes, position: int) -> str:
    """Returns the string value of the key that ends at this position, or "" if it is cut off."""
    value = _VALUE.match(text, position)
    if value is None:
        return ""
    start = value.end() - 1
    end = text.find(b'"', start + 1)
    return _decode(text[start : end + 1])


def _decode(json: bytes | msgspec.Raw) -> str:
    """Decodes a JSON string, or returns "" for a long one: names are short, and the router stores them with its
    counts."""
    if not 0 < len(bytes(json)) <= 6 * 2 * MAX_NAME_CHARS:
        return ""
    try:
        return _text.decode(json)
    except (msgspec.MsgspecError, UnicodeError):
        return ""
