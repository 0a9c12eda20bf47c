"""What goes wrong between a client and a server, under openai-python's names.

APIError
├── APIConnectionError   no answer came
└── APIStatusError       the server refused, in its own words
"""

from __future__ import annotations

import httpx
import msgspec


class APIError(Exception):
    """message: for people, with what to do about it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class APIConnectionError(APIError):
    """The server was not reached, or its answer broke off: whether a change was made is not known."""


class APIStatusError(APIError):
    """code: what a program may go by, such as "model_not_found"; param: the field at fault, where it is one's."""

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
    """Of a response that has been read."""
    try:
        error = msgspec.json.decode(response.content, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):  # something before the server answered
        error = _Error(response.text[:500] or response.reason_phrase)
    return APIStatusError(
        error.message, status_code=response.status_code, type=error.type, param=error.param, code=error.code
    )
