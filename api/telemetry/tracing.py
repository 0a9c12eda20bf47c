"""Traces requests with OpenTelemetry and sends them over OTLP.

A trace has one span for the request, below the client's own if it sent a `traceparent`. Below it are spans for the
router's choice, for finding the adapter, and for each sequence's wait, prefill and decode, from the times that the
engine has recorded. There is no span per token, and there are no prompts or answers.

Attributes have the names of OpenTelemetry's conventions for HTTP and for generative AI, or `lorafleet.…` where those
have none. This module is imported only if traces are on.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet import __version__
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.endpoint import CLIENT_LEFT, endpoint_of
from lorafleet.api.telemetry.sequence_record import SequenceRecord
from lorafleet.api.telemetry.traced import ROUTED_HEADER, set_trace
from lorafleet.protocol.sampling_params import SamplingParams

EXPORT_S = 5.0  # Timeout for one batch of spans.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}

_ROUTED = re.compile(r"(\d{1,20}) (\d{1,12})")  # the router's start since 1970 and its duration, in ns
_LEAST_ERROR = 500

Attributes = dict[str, AttributeValue]


class Tracing:
    """The tracing of one replica.

    Args:
        endpoint: URL of OTLP over HTTP, such as http://localhost:4318/v1/traces. The exporter's other settings are in
            the OTEL_EXPORTER_OTLP_… variables.
        ratio: Share of the requests to sample, 0 to 1, if the client has not decided.
    """

    def __init__(self, endpoint: str, ratio: float, replica_id: str) -> None:
        service = os.environ.get("OTEL_SERVICE_NAME", "lorafleet")
        resource = Resource.create(
            {"service.name": service, "service.version": __version__, "service.instance.id": replica_id}
        )
        self._provider = TracerProvider(sampler=ParentBasedTraceIdRatio(ratio), resource=resource)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lorafleet", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope) -> RequestTrace | None:
        """Starts the trace of a request; returns None if the request is not sampled."""
        headers = Headers(scope=scope)
        span = self._tracer.start_span(
            scope["method"],
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        if not span.is_recording():
            return None
        trace = RequestTrace(self._tracer, span)
        trace.routed(headers.get(ROUTED_HEADER, ""))
        return trace

    def layer(self, app: ASGIApp) -> TraceRequests:
        return TraceRequests(app, self)

    def close(self) -> None:
        """Sends the remaining spans; takes EXPORT_S at most if the endpoint does not answer."""
        self._provider.shutdown()


class TraceRequests:
    """An ASGI layer that traces every POST. Other requests change nothing and are frequent, so they have no trace."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        trace = self._tracing.begin(scope) if is_post else None
        if trace is None:
            await self._app(scope, receive, send)
            return
        set_trace(scope, trace)
        status = CLIENT_LEFT

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        finally:
            trace.end(endpoint_of(scope), status)


class RequestTrace:
    """The span of one request and the spans below it. Its counts are collected until it ends."""

    is_recording = True

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self._input_tokens = 0
        self._cached_tokens = 0
        self._output_tokens = 0
        self._finish_reasons: list[str] = []

    def routed(self, header: str) -> None:
        """Adds a span for the choice of AdapterRouter, which sends its times in a header."""
        match = _ROUTED.fullmatch(header)
        if match is not None:
            began_ns, took_ns = int(match[1]), int(match[2])
            self._add("route", began_ns, began_ns + took_ns)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures the block as a span. If the block raises, the span is marked with the error."""
        with self._tracer.start_as_current_span(name, context=self._context):
            yield

    def describe(
        self, request_id: str, endpoint: str, model: ServedModel, params: SamplingParams, num_choices: int
    ) -> None:
        """Adds the parameters of the request once they are known. The first of several prompts provides them."""
        asked = {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.seed": params.seed,
            "lorafleet.adapter": None if model.lora is None else model.lora.lora_name,
            "lorafleet.adapter.digest": None if model.lora is None else model.lora.digest,
            "lorafleet.tenant": model.caller.tenant,
        }
        self._span.set_attributes({name: value for name, value in asked.items() if value is not None})
        self._span.set_attributes(
            {
                "gen_ai.operation.name": OPERATIONS.get(endpoint, "text_completion"),
                "gen_ai.provider.name": "lorafleet",
                "gen_ai.request.model": model.name,
                "gen_ai.request.choice.count": num_choices,
                "gen_ai.response.id": request_id,
            }
        )

    def sequence_ended(self, record: SequenceRecord) -> None:
        """Adds the spans of a sequence that has ended."""
        times, watch, now = record.times, record.watch, time.monotonic()
        self._output_tokens += record.num_tokens
        self._finish_reasons.append(record.ended)
        if record.counts_prompt:
            self._input_tokens += record.num_prompt_tokens
            self._cached_tokens += record.num_cached_tokens
        common: Attributes = {"lorafleet.sequence": record.index}
        if times is None:  # no token arrived
            self._add_seconds("queue", record.sent_s, now, common | {"lorafleet.finish_reason": record.ended})
            return
        adapter: Attributes = {"lorafleet.adapter.tier": watch.tier, "lorafleet.adapter.rank": watch.lora_rank}
        self._add_seconds("queue", times.queued_s, times.started_s, common | (adapter if watch.tier else {}))
        if times.adapter_s:
            self._add_seconds("load adapter", times.queued_s, times.adapter_s, common | adapter)
        prefill: Attributes = {
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        }
        self._add_seconds("prefill", times.started_s, times.first_s, common | prefill)
        decode: Attributes = {
            "gen_ai.usage.output_tokens": record.num_tokens,
            "lorafleet.finish_reason": record.ended,
        }
        self._add_seconds("decode", times.first_s, times.ended_s or now, common | decode)

    def end(self, endpoint: str, status: int) -> None:
        span = self._span
        span.update_name(f"POST {endpoint}")
        span.set_attributes({"http.route": endpoint, "http.response.status_code": status})
        if self._finish_reasons:
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": self._input_tokens,
                    "gen_ai.usage.cache_read.input_tokens": self._cached_tokens,
                    "gen_ai.usage.output_tokens": self._output_tokens,
                    "gen_ai.response.finish_reasons": self._finish_reasons,
                }
            )
        if status >= _LEAST_ERROR:
            span.set_attribute("error.type", str(status))
            span.set_status(StatusCode.ERROR)
        span.end()

    def _add_seconds(self, name: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        """Adds a span from times in seconds. Both are monotonic, on the clock that all processes of a machine share."""
        since_1970_ns = time.time_ns() - time.monotonic_ns()
        self._add(name, since_1970_ns + int(began_s * 1e9), since_1970_ns + int(ended_s * 1e9), attributes)

    def _add(self, name: str, began_ns: int, ended_ns: int, attributes: Attributes | None = None) -> None:
        span = self._tracer.start_span(name, context=self._context, attributes=attributes, start_time=began_ns)
        span.end(ended_ns)
