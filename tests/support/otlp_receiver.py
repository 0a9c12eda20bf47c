"""Collects OpenTelemetry traces, which arrive by OTLP as protobuf over HTTP, on the loopback interface."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ARRIVE_S = 60.0


@dataclass(frozen=True)
class Seen:
    """One received span; times are in seconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    began_s: float
    ended_s: float
    attributes: dict[str, Any]
    failed: bool
    resource: dict[str, Any]


class Receiver:
    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self._spans: list[Seen] = []
        self._came = threading.Condition()

    def add(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                self._spans += [_seen(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._came.notify_all()

    @property
    def spans(self) -> list[Seen]:
        with self._came:
            return list(self._spans)

    def trace(self, trace_id: str) -> tuple[Seen, list[Seen]]:
        """Waits for the request's own span, and returns it with the spans below it by start time."""
        with self._came:
            assert self._came.wait_for(lambda: _of_request(self._spans, trace_id), ARRIVE_S), self._spans
            whole = _of_request(self._spans, trace_id)
            assert whole is not None
            return whole, sorted((s for s in self._spans if s.parent_id == whole.span_id), key=lambda s: s.began_s)


def _of_request(spans: list[Seen], trace_id: str) -> Seen | None:
    return next((span for span in spans if span.trace_id == trace_id and span.kind == 2), None)  # The kind 2 is SERVER.


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _attributes(span.attributes),
        span.status.code == 2,  # The code 2 is ERROR.
        resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(item) for item in found.values] if kind == "array_value" else found


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            made.add(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Receiver(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()
