"""Declares the trace of a request, and stores it in the ASGI scope while the request is answered.

It does not import OpenTelemetry, which is not installed everywhere. tracing.py defines the contents of a trace.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from starlette.requests import Request

from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.sequence_record import SequenceRecord
from lorafleet.protocol.sampling_params import SamplingParams

# Set by AdapterRouter and passed on by HAProxy, which removes headers with this prefix from clients.
ROUTED_HEADER = "x-serve-router-lorafleet-ns"

_TRACE = "lorafleet.trace"  # in the ASGI scope


class Trace(Protocol):
    @property
    def is_recording(self) -> bool:
        """Whether the engine shall measure the request's sequences."""
        ...

    def part(self, name: str, /) -> AbstractContextManager[None]:
        """Measures the block as a separate span."""
        ...

    def describe(
        self, request_id: str, endpoint: str, model: ServedModel, params: SamplingParams, num_choices: int, /
    ) -> None:
        """Adds the parameters of the request once they are known. The first of several prompts provides them."""
        ...

    def sequence_ended(self, record: SequenceRecord, /) -> None:
        """Adds the spans of a sequence that has ended."""
        ...


class NoTrace:
    """The trace of a request that is not sampled, or of a server without tracing."""

    is_recording = False

    def part(self, _: str) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self, *_: object) -> None:
        pass

    def sequence_ended(self, _: SequenceRecord) -> None:
        pass


NO_TRACE = NoTrace()


def set_trace(scope: MutableMapping[str, Any], trace: Trace) -> None:
    scope[_TRACE] = trace


def trace_of(request: Request) -> Trace:
    trace: Trace = request.scope.get(_TRACE, NO_TRACE)
    return trace
