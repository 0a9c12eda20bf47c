"""Streams completions at given times from a process of its own, so that measuring them costs no server CPU.

    python benchmarks/http_load.py < job.json > report.json

Each request has its own connection. The client reads sockets itself with httptools, since a client library costs more
than the token that it reads. The report has the client's own CPU time; each outcome has the time at which its request
was sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from latency import Outcome

PATIENCE_S = 60.0  # The longest wait after the time of the last request.


class Call(msgspec.Struct):
    at_s: float
    model: str
    prompt: list[int]
    max_tokens: int


class Job(msgspec.Struct):
    base_url: str
    calls: list[Call]


class Report(msgspec.Struct):
    outcomes: list[Outcome]
    cpu_s: float
    wall_s: float


class _Choice(msgspec.Struct):
    text: str


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _Stream(asyncio.Protocol):
    """Handles one request on its connection; httptools calls the on_… methods."""

    def __init__(self, call: Call, request: bytes, clock_zero: float) -> None:
        self.outcome = Outcome(call.at_s, 0.0, [], 0)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call = call
        self._request = request
        self._zero = clock_zero
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.outcome.sent_s = time.perf_counter() - self._zero
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter() - self._zero
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"the answer cannot be read: {error!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection lost: {exc}")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                self._take(_decode_event(event.removeprefix(b"data: ")))

    def on_message_complete(self) -> None:
        status, got, asked = self._parser.get_status_code(), self.outcome.num_tokens, self._call.max_tokens
        if status != 200:
            self._end(f"{status}: {self._rest[:300].decode(errors='replace')}")
        else:
            self._end(None if got == asked and self.outcome.chunks_s else f"{got} tokens in place of {asked}")

    def _take(self, event: _Event) -> None:
        if event.error is not None:
            self._end(event.error.message)
        if event.usage is not None:
            self.outcome.num_tokens = event.usage.completion_tokens
        if any(choice.text for choice in event.choices):
            self.outcome.chunks_s.append(self._now)

    def _end(self, error: str | None) -> None:
        if not self.ended.done():
            self.outcome.error = error
            self.ended.set_result(None)
            self._transport.close()


async def run(job: Job) -> Report:
    address = urlsplit(job.base_url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    requests = [_request(f"{host}:{port}", call) for call in job.calls]
    cpu_before, zero = time.process_time(), time.perf_counter()

    async def ask(call: Call, request: bytes) -> Outcome:
        await asyncio.sleep(call.at_s - (time.perf_counter() - zero))
        try:
            _, stream = await asyncio.get_running_loop().create_connection(
                lambda: _Stream(call, request, zero), host, port
            )
        except OSError as error:
            return Outcome(call.at_s, call.at_s, [], 0, f"no connection: {error}")
        try:
            async with asyncio.timeout(max(other.at_s for other in job.calls) - call.at_s + PATIENCE_S):
                await stream.ended
        except TimeoutError:
            stream.outcome.error = f"not complete after {PATIENCE_S:.0f} s"
        return stream.outcome

    outcomes = await asyncio.gather(*map(ask, job.calls, requests))
    return Report(outcomes, time.process_time() - cpu_before, time.perf_counter() - zero)


def _request(host: str, call: Call) -> bytes:
    body = msgspec.json.encode(
        {
            "model": call.model,
            "prompt": call.prompt,
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(job))))


if __name__ == "__main__":
    main()
