"""Stores a request's trace in the ASGI scope while it is answered.

It does not import OpenTelemetry, which is not installed everywhere. tracing.py defines the contents of a trace.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

if TYPE_CHECKING:
    from lorafleet.api.telemetry.tracing import RequestTrace

# Set by AdapterRouter and passed on by HAProxy, which removes headers with this prefix from clients.
ROUTED_HEADER = "x-serve-router-lorafleet-ns"

_TRACE = "lorafleet.trace"  # in the ASGI scope


def set_trace(scope: MutableMapping[str, Any], trace: RequestTrace) -> None:
    scope[_TRACE] = trace


def trace_of(request: Request) -> RequestTrace | None:
    """Returns the request's trace; None if tracing is off or the request was not sampled."""
    return request.scope.get(_TRACE)


def traced(trace: RequestTrace | None, name: str) -> AbstractContextManager[None]:
    """Measures the block as a separate span, if there is a trace."""
    return nullcontext() if trace is None else trace.part(name)
