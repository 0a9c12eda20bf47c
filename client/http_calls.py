"""Converts verbs to HTTP calls, and responses to answers. The clients in admin.py only send the calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from lorafleet.client.client_errors import APIConnectionError, status_error
from lorafleet.protocol.admin_verbs import UploadAdapter, UploadTensors, Verb, route_of

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class HttpCall:
    method: str
    path: str
    query: Mapping[str, str | list[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None  # JSON.

    def with_body(self, content_type: str, num_bytes: int) -> HttpCall:
        """Returns the call with the headers of a body, which the caller sends."""
        return replace(self, headers={"content-type": content_type, "content-length": str(num_bytes)})


def call_of(verb: Verb[object]) -> HttpCall:
    """Returns the call of a verb. Fields that have their defaults are left out."""
    route = route_of(verb)
    fields: dict[str, Any] = msgspec.to_builtins(verb)
    path = route.path.format(**{name: quote(fields.pop(name)) for name in route.in_path})
    if isinstance(verb, UploadAdapter | UploadTensors):
        fields["options"] = msgspec.json.encode(verb.options).decode()
    if route.method == "POST" and not route.in_query:
        headers = {"content-type": "application/json"}
        return HttpCall(route.method, path, headers=headers, body=msgspec.json.encode(fields))
    return HttpCall(route.method, path, {name: _in_query(value) for name, value in fields.items()})


def _in_query(value: Any) -> str | list[str]:
    return list(map(str, value)) if isinstance(value, list | tuple) else str(value)


def answer_of(verb: Verb[AnswerT], response: httpx.Response) -> AnswerT:
    """Returns the answer in a response. Raises APIStatusError, and APIConnectionError for what is no answer."""
    if not response.is_success:
        raise status_error(response)
    try:
        return msgspec.json.decode(response.content, type=verb.answer_type())
    except msgspec.DecodeError as error:
        raise APIConnectionError(f"{response.url} did not answer as a lorafleet server does: {error}.") from error


@contextmanager
def reaching(url: httpx.URL) -> Iterator[None]:
    """Converts httpx's errors of the connection to APIConnectionError."""
    try:
        yield
    except httpx.TransportError as error:
        raise APIConnectionError(f"{url} does not answer: {error or type(error).__name__}.") from error
