"""Errors between a client and a server, with openai-python's names.

APIError
├── APIConnectionError   no answer arrived
│   └── DownloadError    a download broke off, or its bytes are not the adapter's
└── APIStatusError       the server rejected the call; the message is its own
"""

from __future__ import annotations

import httpx
import msgspec


class APIError(Exception):
    """Base of all client errors. The message is for people and gives a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class APIConnectionError(APIError):
    """An error that means that the server was not reached or its answer broke off. It is unknown whether a change was
    made."""


class DownloadError(APIConnectionError):
    """An error that means that a download broke off or was damaged. No file is where the adapter should be."""


class APIStatusError(APIError):
    """An error response of the server.

    `code` is for programs, such as "model_not_found". `param` is the field at fault, if there is one.
    """

    def __init__(
        self, message: str, *, status_code: int, type: str | None, param: str | None, code: str | None
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.type = type
        self.param = param
        self.code = code


class _Error(msgspec.Struct):
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


def status_error(response: httpx.Response) -> APIStatusError:
    """Returns the error for a response that has been read."""
    try:
        error = msgspec.json.decode(response.content, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):  # a proxy answered instead of the server
        error = _Error(response.text[:500] or response.reason_phrase)
    return APIStatusError(
        error.message, status_code=response.status_code, type=error.type, param=error.param, code=error.code
    )
