"""What a route takes and answers, said where its handler is, for /openapi.json (openapi.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

_OPERATION = "__lorafleet_operation__"
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


REQUEST_ID = "X-Request-Id"
QUEUE_TIMEOUT = "X-Queue-Timeout-Seconds"
STARTING = (REQUEST_ID, QUEUE_TIMEOUT)  # the headers of requests that start sequences


class PlainText:
    """An answer that is no JSON."""


class TarFile:
    """A body that is no JSON."""


@dataclass(frozen=True, slots=True)
class Operation:
    """body: the model that checks it; None: none is read. query: the parameters behind the "?". answer: a type; None:
    its body is empty. events: of a stream, as `stream: true` asks for; None: it never streams. headers: their names.
    """

    summary: str
    body: type[BaseModel] | type[TarFile] | None = None
    answer: Any = None
    events: Any = None
    query: type[BaseModel] | None = None
    headers: tuple[str, ...] = ()


def describe(
    summary: str,
    *,
    body: type[BaseModel] | type[TarFile] | None = None,
    answer: Any = None,
    events: Any = None,
    query: type[BaseModel] | None = None,
    headers: tuple[str, ...] = (),
) -> Callable[[_Handler], _Handler]:
    def noted(handler: _Handler) -> _Handler:
        setattr(handler, _OPERATION, Operation(summary, body, answer, events, query, headers))
        return handler

    return noted


def operation_of(handler: Callable[..., Any]) -> Operation | None:
    """None of pages for people."""
    found: Operation | None = getattr(handler, _OPERATION, None)
    return found
