"""Lets a handler declare what its route accepts and answers, for /openapi.json (openapi.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

_OPERATION = "__lorafleet_operation__"
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


REQUEST_ID = "X-Request-Id"
QUEUE_TIMEOUT = "X-Queue-Timeout-Seconds"
STARTING = (REQUEST_ID, QUEUE_TIMEOUT)  # Headers of requests that start sequences.


class PlainText:
    """Marks an answer that is plain text, not JSON."""


class TarFile:
    """Marks a body or an answer that is a tar file, not JSON."""


class TensorBytes:
    """Marks a body of config, checksums and tensors (protocol/adapter_formats/tensor_push.py), not JSON."""


class UploadForm:
    """Marks a body that is multipart/form-data with one file (cluster/batches/upload_form.py), not JSON."""


class FileBytes:
    """Marks an answer that is the bytes of a file."""


Body = type[BaseModel] | type[TarFile] | type[TensorBytes] | type[UploadForm] | None


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of a route for the OpenAPI document."""

    summary: str
    body: Body = None  # The model that checks the body; None: no body is read.
    answer: Any = None  # The type of the answer; None: its body is empty.
    events: Any = None  # The type of the events with `stream: true`; None: the route never streams.
    query: type[BaseModel] | None = None  # The model that checks the query parameters.
    headers: tuple[str, ...] = ()  # Names of request headers.


def describe(
    summary: str,
    *,
    body: Body = None,
    answer: Any = None,
    events: Any = None,
    query: type[BaseModel] | None = None,
    headers: tuple[str, ...] = (),
) -> Callable[[_Handler], _Handler]:
    def described(handler: _Handler) -> _Handler:
        setattr(handler, _OPERATION, Operation(summary, body, answer, events, query, headers))
        return handler

    return described


def operation_of(handler: Callable[..., Any]) -> Operation | None:
    """Returns the handler's operation, or None for pages that people read."""
    found: Operation | None = getattr(handler, _OPERATION, None)
    return found
