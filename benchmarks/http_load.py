"""Streams completions from a process of its own, so that measuring them costs no server CPU.

    python benchmarks/http_load.py < job.json > report.json

Requests are sent at given times, or in a closed loop: each of a number of streams sends the next request when its last
answer is complete. Each request has its own connection. The client reads sockets itself with httptools, since a client
library costs more than the token that it reads. The report has the client's own CPU time; each outcome has the time at
which its request was sent.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from latency import Outcome

PATIENCE_S = 60.0  # The longest wait after the time of the last request; in a closed loop, after each request.
NO_BOUND_S = 1e9  # JSON has no infinity.


class Call(msgspec.Struct):
    at_s: float  # The time at which it is sent, unless the job is a closed loop.
    model: str
    prompt: list[int]
    max_tokens: int


class Job(msgspec.Struct):
    base_url: str
    calls: list[Call]
    streams: int = 0  # If it is not 0, this many streams send the calls in a closed loop.
    seconds: float = NO_BOUND_S  # A closed loop sends nothing after this time.
    fields: dict[str, Any] = {}  # Further fields of each request, such as sampling fields.
    headers: list[str] = []  # Further header lines of each request.


class Report(msgspec.Struct):
    outcomes: list[Outcome]
    cpu_s: float
    wall_s: float


class ReportLost(Exception):
    """The process of a job ended without a whole report."""


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
            line = event.strip()  # A line that begins with a colon is a comment, which keeps a connection alive.
            if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                self._take(_decode_event(line[5:]))

    def on_message_complete(self) -> None:
        status, got, asked = self._parser.get_status_code(), self.outcome.num_tokens, self._call.max_tokens
        if status != 200:
            self._end(f"{status}: {self._rest[:300].decode(errors='replace')}")
        else:
            text = "" if self.outcome.chunks_s else ", none of which has text"
            self._end(None if got == asked and not text else f"{got} tokens in place of {asked}{text}")

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
    requests = [_request(f"{host}:{port}", address.path.rstrip("/"), call, job) for call in job.calls]
    cpu_before, zero = time.process_time(), time.perf_counter()

    async def ask(call: Call, request: bytes, patience_s: float) -> Outcome:
        try:
            _, stream = await asyncio.get_running_loop().create_connection(
                lambda: _Stream(call, request, zero), host, port
            )
        except OSError as error:
            return Outcome(call.at_s, call.at_s, [], 0, f"no connection: {error}")
        try:
            async with asyncio.timeout(patience_s):
                await stream.ended
        except TimeoutError:
            stream.outcome.error = f"not complete after {PATIENCE_S:.0f} s"
        return stream.outcome

    async def ask_in_time(call: Call, request: bytes) -> Outcome:
        await asyncio.sleep(call.at_s - (time.perf_counter() - zero))
        return await ask(call, request, last_s - call.at_s + PATIENCE_S)

    async def ask_in_turn() -> list[Outcome]:
        outcomes = []
        for call, request in turns:
            call.at_s = time.perf_counter() - zero
            if call.at_s > job.seconds:
                break
            outcomes.append(await ask(call, request, PATIENCE_S))
        return outcomes

    if job.streams:
        turns = zip(job.calls, requests, strict=True)  # All streams take their calls from it.
        by_stream = await asyncio.gather(*(ask_in_turn() for _ in range(job.streams)))
        outcomes = [outcome for outcomes in by_stream for outcome in outcomes]
    else:
        last_s = max(call.at_s for call in job.calls)
        outcomes = await asyncio.gather(*map(ask_in_time, job.calls, requests))
    return Report(outcomes, time.process_time() - cpu_before, time.perf_counter() - zero)


def run_apart(job: Job) -> Report:
    """Runs the job in a process of its own. Raises ReportLost if it reports nothing that can be read."""
    command, given = [sys.executable, __file__], msgspec.json.encode(job)
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=False)
    try:
        return msgspec.json.decode(done.stdout, type=Report)
    except msgspec.DecodeError as error:
        text = f"the load's process ended with status {done.returncode} and {len(done.stdout)} bytes: {error}"
        raise ReportLost(text) from error


def _request(host: str, path: str, call: Call, job: Job) -> bytes:
    body = msgspec.json.encode(
        {
            "model": call.model,
            "prompt": call.prompt,
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **job.fields,
        }
    )
    lines = [f"POST {path}/v1/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *job.headers]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "Connection: close"])
    return f"{head}\r\n\r\n".encode() + body


def write_whole(number: int, content: bytes) -> None:
    """Writes all of the content to a file descriptor. Under `python -u`, sys.stdout.buffer.write may write a part."""
    with open(number, "wb", closefd=False) as file:
        file.write(content)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    write_whole(sys.stdout.fileno(), msgspec.json.encode(uvloop.run(run(job))))


if __name__ == "__main__":
    main()
