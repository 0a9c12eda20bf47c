"""Where a request's trace is, while it is answered. Needs no OpenTelemetry, which is not installed everywhere: what
there is in a trace is in tracing.py.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

if TYPE_CHECKING:
    from lorafleet.api.telemetry.tracing import RequestTrace

# From AdapterRouter, by HAProxy, which removes what clients send under this prefix.
ROUTED_HEADER = "x-serve-router-lorafleet-ns"

_TRACE = "lorafleet.trace"  # in the ASGI scope


def set_trace(scope: MutableMapping[str, Any], trace: RequestTrace) -> None:
    scope[_TRACE] = trace


def trace_of(request: Request) -> RequestTrace | None:
    """None where traces are off, and for requests that were not drawn."""
    return request.scope.get(_TRACE)


def traced(trace: RequestTrace | None, name: str) -> AbstractContextManager[None]:
    """The block as a span of its own."""
    return nullcontext() if trace is None else trace.part(name)
