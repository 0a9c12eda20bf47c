"""Defines the responses that HAProxy gives by itself: if no replica answers, and to clients that exceed its bounds.

HAProxy rejects a request whose first bytes are wrong before it uses these responses, with a 400 or 408 in HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

MAX_HEADER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    status: HTTPStatus
    type: str
    code: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> str:
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error})

    def whole(self) -> str:
        """Returns the response with its head, as HAProxy's errorfile requires."""
        headers = {"content-type": "application/json", "content-length": str(len(self.body)), **self.headers}
        lines = [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([f"HTTP/1.1 {self.status.value} {self.status.phrase}", *lines, "", self.body])

    def rule(self) -> str:
        """Returns the arguments of HAProxy's `http-request return`."""
        text = self.body.replace("\\", "\\\\").replace('"', '\\"')
        headers = "".join(f" hdr {name} {value}" for name, value in self.headers.items())
        return f'status {self.status.value} content-type application/json string "{text}"{headers}'


HEADERS_TOO_LARGE = ErrorAnswer(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "invalid_request_error",
    "headers_too_large",
    f"The request's headers are larger than {MAX_HEADER_BYTES} bytes. Send smaller ones.",
)
NOT_A_REQUEST = ErrorAnswer(
    HTTPStatus.BAD_REQUEST,
    "invalid_request_error",
    "invalid_http_request",
    "The request is not valid HTTP/1.1, or it ended before it was whole. Send it again, whole.",
    {"connection": "close"},
)
TOO_SLOW = ErrorAnswer(
    HTTPStatus.REQUEST_TIMEOUT,
    "invalid_request_error",
    "request_timeout",
    "The request was not sent in time. Send its headers and its body without a pause.",
    {"connection": "close"},
)
NO_REPLICA = ErrorAnswer(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "server_error",
    "no_replica",
    "No replica of this server answers. Try again in a moment.",
    {"retry-after": "1"},
)


def replica_starts(expected_s: int) -> ErrorAnswer:
    """Returns the response to a request that may not wait, or has waited too long, until there is a replica."""
    return ErrorAnswer(
        HTTPStatus.TOO_MANY_REQUESTS,
        "rate_limit_error",
        "replica_starting",
        "The server's replicas are being started or replaced, and too many requests wait for them, or this one has "
        f"waited too long. Try again in {expected_s} seconds.",
        {"retry-after": str(expected_s)},
    )


OUTCOME_UNKNOWN = ErrorAnswer(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "server_error",
    "outcome_unknown",
    "The replica that received this request ended or went silent before it answered, so it is unknown whether the "
    "request was carried out. Check that before you repeat a call that changes something; repeat any other request.",
    {"retry-after": "1"},
)
ERRORS = {  # By the status of HAProxy's own error: 502 is a broken connection, 503 no connection, 504 a silent replica.
    400: NOT_A_REQUEST,
    408: TOO_SLOW,
    502: OUTCOME_UNKNOWN,
    503: NO_REPLICA,
    504: OUTCOME_UNKNOWN,
}


def write_error_files(folder: Path) -> dict[int, str]:
    """Writes a file for each of ERRORS. Returns their paths by status."""
    paths = {status: folder / f"error-{status}.http" for status in ERRORS}
    for status, path in paths.items():
        path.write_text(ERRORS[status].whole(), newline="")
    return {status: str(path) for status, path in paths.items()}
