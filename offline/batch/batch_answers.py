"""Writes the lines of a batch's output in OpenAI's format: id, custom_id, response and error.

An id is made of the input's fingerprint and the number of the line. A later run therefore finds in the output itself
which lines are answered, and recognizes the output of another input.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from lorafleet.offline.batch.batch_input import BatchLine

OK = 200
_ID = re.compile(r"batch_req_([0-9a-f]{12})_([1-9][0-9]{0,15})")


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line."""

    line: BatchLine
    status: int = 0  # HTTP status; 0 if there is no response.
    request_id: str = ""
    body: Any = None
    error: tuple[str, str] | None = None  # Code and message, if there is no response.

    @property
    def failed(self) -> bool:
        return self.status != OK


def id_head(fingerprint: str) -> bytes:
    """Returns the first bytes of every line of the output."""
    return b'{"id": "batch_req_' + fingerprint.encode() + b"_"


def write_answer(answer: LineAnswer, fingerprint: str) -> bytes:
    """Returns the line with its end."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    content = {
        "id": f"batch_req_{fingerprint}_{answer.line.number}",
        "custom_id": answer.line.custom_id,
        "response": response if answer.error is None else None,
        "error": None if answer.error is None else {"code": answer.error[0], "message": answer.error[1]},
    }
    try:
        return json.dumps(content, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can express
        return json.dumps(content).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """The part of a line of the output that a later run needs."""

    fingerprint: str
    number: int
    failed: bool


def read_answer(raw: bytes) -> AnsweredLine | None:
    """Returns the identity of an answer, or None if the JSON is not a line of write_answer(). Raises ValueError if it
    is not JSON."""
    content = json.loads(raw.decode())
    found = _ID.fullmatch(str(content.get("id"))) if isinstance(content, dict) else None
    if found is None or content.keys() != {"id", "custom_id", "response", "error"}:
        return None
    response = content["response"]
    failed = not isinstance(response, dict) or response.get("status_code") != OK
    return AnsweredLine(found[1], int(found[2]), failed)
