"""Writes the lines of a batch's output in OpenAI's format: id, custom_id, response and error.

An id is made of the input's fingerprint and the number of the line. A later run therefore finds in the output itself
which lines are answered, and recognizes the output of another input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from lorafleet.offline.batch.batch_input import BatchLine

OK = 200
_NULL = b"null"
_ID = re.compile(r"batch_req_([0-9a-f]{12})_([1-9][0-9]{0,15})")


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line."""

    line: BatchLine
    status: int = 0  # HTTP status; 0 if there is no response.
    request_id: str = ""
    body: bytes = _NULL  # JSON in one line.
    error: tuple[str, str] | None = None  # Code and message, if there is no response.

    @property
    def failed(self) -> bool:
        return self.status != OK


def id_head(fingerprint: str) -> bytes:
    """Returns the first bytes of every line of the output."""
    return b'{"id": "batch_req_' + fingerprint.encode() + b"_"


def write_answer(answer: LineAnswer, fingerprint: str) -> bytes:
    """Returns the line with its end."""
    response, error = _NULL, _NULL
    if answer.error is None:
        head = msgspec.json.encode({"status_code": answer.status, "request_id": _sound(answer.request_id)})
        response = head[:-1] + b', "body": ' + answer.body + b"}"
    else:
        error = msgspec.json.encode({"code": answer.error[0], "message": _sound(answer.error[1])})
    custom_id = msgspec.json.encode(answer.line.custom_id)
    head = id_head(fingerprint) + f'{answer.line.number}", "custom_id": '.encode()
    return b"".join([head, custom_id, b', "response": ', response, b', "error": ', error, b"}\n"])


def _sound(text: str) -> str:
    """Returns the text without halves of surrogate pairs, which UTF-8 does not have."""
    return text.encode(errors="replace").decode()


class _Response(msgspec.Struct):
    """The part of a response that tells whether its line failed."""

    status_code: int


class _WrittenLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of write_answer()."""

    id: str
    custom_id: msgspec.Raw
    response: _Response | None
    error: msgspec.Raw


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """The part of a line of the output that a later run needs."""

    fingerprint: str
    number: int
    failed: bool


def read_answer(raw: bytes) -> AnsweredLine | None:
    """Returns the identity of an answer, or None if the JSON is not a line of write_answer(). Raises ValueError if it
    is not JSON."""
    try:
        content = msgspec.json.decode(raw, type=_WrittenLine)
    except msgspec.ValidationError:
        return None
    found = _ID.fullmatch(content.id)
    if found is None:
        return None
    failed = content.response is None or content.response.status_code != OK
    return AnsweredLine(found[1], int(found[2]), failed)
