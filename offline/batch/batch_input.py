"""Reads a batch's requests: JSON lines in OpenAI's batch format, each with custom_id, method, url and body.

A line that cannot be sent is returned with its fault, and the other lines are not affected. Duplicate ids are refused
before anything is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_BODY_BYTES, MAX_LABEL_CHARS, MAX_OBJECT_FIELDS, cut
from lorafleet.protocol.outside.json_counts import JsonCounts
from lorafleet.protocol.yield_gil import yielding_gil

MAX_LINE_BYTES = MAX_BODY_BYTES + (64 << 10)  # A body of the largest size, and the other fields.
MAX_LINES = 1_000_000  # Lines of one batch; OpenAI accepts 50,000.
MAX_SHOWN_DUPLICATES = 10
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_FIELDS = {"custom_id", "method", "url", "body"}
_COUNTED_BYTES = 1 << 18  # Bytes that are counted at a time, in about 0.3 ms.
_OFF = (b"false", b"null")  # What `stream` may be.

_Object = dict[str, msgspec.Raw]  # An object whose values have been checked but not read.


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input."""

    number: int  # From 1, with blank lines counted.
    custom_id: str | None  # None if the line has no valid one.
    url: str = ""
    body: bytes = b""  # JSON.
    fault: str | None = None  # The reason why the line cannot be sent.


@dataclass(frozen=True, slots=True)
class BatchContents:
    """The properties of a whole input."""

    fingerprint: str  # The first 12 hexadecimal digits of the SHA-256 of its bytes.
    numbers: frozenset[int]  # Numbers of the lines that are not blank.


class _Streamed(msgspec.Struct):
    """The field of a body that this module reads."""

    stream: msgspec.Raw = msgspec.Raw(b"null")


class _LineFault(Exception):
    """A line that cannot be sent."""


def scan_input(
    file: BinaryIO, max_lines: int = MAX_LINES, on_line: Callable[[BatchLine], None] = lambda _: None
) -> BatchContents:
    """Reads the whole input once, and calls `on_line` with each line that is not blank. Raises InvalidRequest if the
    input has no lines, too many, or a custom_id twice."""
    digest = hashlib.sha256()
    lines_by_id: dict[bytes, int] = {}
    numbers: set[int] = set()
    duplicates: list[str] = []
    for number, raw in _raw_lines(file, digest):
        if len(numbers) >= max_lines:
            raise InvalidRequest(f"the input has more than {max_lines} lines; split it into several batches.")
        numbers.add(number)
        line = parse_line(number, raw)
        on_line(line)
        custom_id = line.custom_id
        if custom_id is None:
            continue
        # A digest, since a million ids may be long.
        key = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
        first = lines_by_id.setdefault(key, number)
        if first != number:
            duplicates.append(f"{cut(repr(custom_id))} in lines {first} and {number}")
    if duplicates:
        shown = "; ".join(duplicates[:MAX_SHOWN_DUPLICATES])
        more = len(duplicates) - MAX_SHOWN_DUPLICATES
        raise InvalidRequest(
            f"each custom_id may occur once, since answers are matched by it. Rename these: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}."
        )
    if not numbers:
        raise InvalidRequest("the input has no lines; write one JSON object with custom_id, method, url and body each.")
    return BatchContents(digest.hexdigest()[:12], frozenset(numbers))


def read_input(file: BinaryIO) -> Iterator[BatchLine]:
    """Yields the lines that are not blank."""
    for number, raw in _raw_lines(file):
        yield parse_line(number, raw)


def _raw_lines(file: BinaryIO, digest: Any = None) -> Iterator[tuple[int, bytes | None]]:
    """Yields number and bytes of the lines that are not blank. The bytes of a line that is too long are None: it is
    skipped in pieces, so that it does not fill the memory."""
    file.seek(0)
    number, is_long = 1, False
    while raw := file.readline(MAX_LINE_BYTES + 1):
        if digest is not None:
            digest.update(raw)
        ends = raw.endswith(b"\n")
        is_long = is_long or (not ends and len(raw) > MAX_LINE_BYTES)
        if not ends and len(raw) > MAX_LINE_BYTES:
            continue  # The next piece belongs to the same line.
        if is_long:
            yield number, None
        elif raw.strip():
            yield number, raw
        number, is_long = number + 1, False
    if is_long:  # The last line ended with a full piece.
        yield number, None


def parse_line(number: int, raw: bytes | None) -> BatchLine:
    """Returns the line, with its fault if it cannot be sent."""
    if raw is None:
        return BatchLine(number, None, fault=f"line {number} has more than {MAX_LINE_BYTES} bytes; shorten it.")
    custom_id: str | None = None
    try:
        given = _object(raw)
        custom_id = _custom_id(given)
        url, body = _request(given)
    except _LineFault as fault:
        return BatchLine(number, custom_id, fault=f"line {number}: {fault}")
    return BatchLine(number, custom_id, url, body)


def _object(raw: bytes) -> _Object:
    """Reads the names of an object's fields. The values stay as they are, since a body may be large."""
    counts = JsonCounts("the line")
    try:
        for begin in yielding_gil(range(0, len(raw), _COUNTED_BYTES)):
            counts.add(raw[begin : begin + _COUNTED_BYTES])
        given = msgspec.json.decode(raw, type=_Object)
    except InvalidRequest as error:
        raise _LineFault(error.message) from None
    except msgspec.ValidationError:
        raise _LineFault("not a JSON object; write custom_id, method, url and body.") from None
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors.
        raise _LineFault(f"not valid JSON: {cut(str(error))}.") from None
    if len(given) > MAX_OBJECT_FIELDS:
        raise _LineFault(f"it has {len(given)} fields; the fields are {', '.join(sorted(_FIELDS))}.")
    return given


def _text(given: _Object, name: str) -> str | None:
    """Returns the field's text, or None if it is missing or is no text."""
    try:
        return msgspec.json.decode(given[name], type=str)
    except (KeyError, ValueError):
        return None


def _custom_id(given: _Object) -> str:
    custom_id = _text(given, "custom_id")
    if custom_id is None or not 1 <= len(custom_id) <= MAX_LABEL_CHARS:
        raise _LineFault(f"`custom_id` must be a string of 1 to {MAX_LABEL_CHARS} characters.")
    return custom_id


def _request(given: _Object) -> tuple[str, bytes]:
    unknown = sorted(given.keys() - _FIELDS)
    if unknown:
        raise _LineFault(f"unknown field {cut(repr(unknown[0]))}; the fields are {', '.join(sorted(_FIELDS))}.")
    if _text(given, "method") != "POST":
        raise _LineFault("`method` must be 'POST'.")
    url = _text(given, "url")
    if url not in URLS:
        shown = cut(bytes(given.get("url", b"missing")).decode(errors="replace"))
        raise _LineFault(f"`url` is {shown}; it must be one of {', '.join(URLS)}.")
    return url, _body(given)


def _body(given: _Object) -> bytes:
    """Returns the body as it was written, without reading its values."""
    body = bytes(given.get("body", b""))
    try:
        fields = msgspec.json.decode(body, type=_Streamed)
    except (ValueError, RecursionError):
        raise _LineFault("`body` must be a JSON object.") from None
    if bytes(fields.stream) not in _OFF:
        raise _LineFault("`stream` is not supported in a batch; leave it out.")
    return body
