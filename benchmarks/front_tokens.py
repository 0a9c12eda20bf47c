"""Measures the CPU time of the HTTP front per streamed token. A simulated engine sends one token of every stream in
each step.

    python benchmarks/front_tokens.py [--routes completions chat] [--rates 4000 20000 40000] [--streams 256]
        [--tokens 2000] [--seconds 6] [--profile FILE] [--json FILE]

There are three processes. The engine sends real StepBatches over the real socket, at a fixed number of tokens per
second. The front is the real API in uvicorn with uvloop, as in a replica of Serve. The client only counts events, and
sends the next request of a stream as soon as an answer is complete.

For each route and rate it prints the tokens per second that the engine sent and the tokens in each event (more than
one if the front was behind), and the front's CPU time per token in us: in total and in the kernel. Both include
the start of each request, divided by its tokens.

`--profile` writes a flame graph of the front by py-spy, which comes with Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import subprocess
import tempfile
import time
from ctypes import c_int64
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import psutil
import uvicorn
import uvloop

from http_frontend import END_OF_BODY, NoAdapters
from lorafleet.api.app_state import make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.messages import EngineHello, EngineStats, StepBatch, TokenOutput
from lorafleet.protocol.sealing import REQUEST, unseal
from lorafleet.protocol.transport.engine_socket import EngineClient, WorkerSocket, ipc_address

ROOT = Path(__file__).resolve().parent.parent
HELLO = EngineHello(vocab_size=1536, max_model_len=1 << 20, kv_cache_tokens=1 << 24, eos_token_ids=[])
ROUTES = {
    "completions": ("/v1/completions", {"prompt": "Hello"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
STATS_PERIOD_S = 0.1
WARM_UP_S = 2.0

_processes = multiprocessing.get_context("spawn")


def run_engine(address: str, tokens_per_s: float, num_streams: int, num_sent: Any) -> None:
    """Sends tokens until it is killed. A step lasts as long as `num_streams` tokens need at the given rate."""
    worker = WorkerSocket(address)
    token_ids = [random.Random(0).randrange(66, 1500) for _ in range(4096)]
    left: dict[str, int] = {}  # Tokens that each running sequence has yet to get, by request ID.
    acknowledged, due_s, stats_due_s, step = 0, 0.0, 0.0, 0
    while True:
        batches = worker.receive(max(0, int(1000 * (due_s - time.monotonic()))))
        for batch in batches:
            acknowledged = batch.sequence
            left |= {sealed.id: unseal(sealed, REQUEST).params.max_tokens or 1 for sealed in batch.requests}
            for request_id in batch.aborts:
                left.pop(request_id, None)
        now, num_outputs = time.monotonic(), 0
        message = StepBatch(acknowledged, sent_s=now)
        if now >= due_s:
            due_s, step = max(due_s, now - 0.05) + num_streams / tokens_per_s, step + 1
            for index, (name, count) in enumerate(left.items()):
                token = token_ids[(step + index) % 4096]
                if count > 1:
                    message.plain.request_ids.append(name)
                    message.plain.token_ids.append(token)
                else:
                    message.outputs.append(TokenOutput(request_id=name, token_ids=[token], finish_reason="length"))
            num_outputs = len(left)
            left = {name: count - 1 for name, count in left.items() if count > 1}
        if num_outputs or batches or now >= stats_due_s:
            if now >= stats_due_s:
                message.stats, stats_due_s = EngineStats(num_running=len(left)), now + STATS_PERIOD_S
            worker.send(message)
            num_sent.value += num_outputs


def run_front(address: str, listener: socket.socket) -> None:
    """Serves until it is killed."""

    async def serve() -> None:
        engine = await EngineClient.connect(address, HELLO)
        tokenizer = Tokenizer.from_folder(str(ROOT / "demo" / "model"))
        state = make_state(FrontConfig(("base",), "", chat_template=TEMPLATE), tokenizer, engine, NoAdapters())
        config = uvicorn.Config(build_api(lambda: state), lifespan="off", access_log=False, log_level="critical")
        await uvicorn.Server(config).serve(sockets=[listener])

    uvloop.run(serve())


class Client(asyncio.Protocol):
    """Keeps one connection, and sends the next request as soon as an answer is complete."""

    def __init__(self, request: bytes) -> None:
        self.num_events = 0
        self.num_answers = 0
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        if data.endswith(END_OF_BODY):
            self.num_answers += 1
            self._transport.write(self._request)


def run_client(port: int, route: str, num_streams: int, num_tokens: int, pipe: Connection) -> None:
    """Sends the number of events and of answers so far each time that it is asked."""

    async def load() -> None:
        loop, clients = asyncio.get_running_loop(), []
        for _ in range(num_streams):
            _, client = await loop.create_connection(lambda: Client(_request(route, num_tokens)), "127.0.0.1", port)
            clients.append(client)
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send((sum(client.num_events for client in clients), sum(client.num_answers for client in clients)))

    uvloop.run(load())


def _request(route: str, num_tokens: int) -> bytes:
    path, prompt = ROUTES[route]
    body = json.dumps({"model": "base", **prompt, "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def measure(
    route: str, rate: float, num_streams: int, num_tokens: int, seconds: float, profile: str | None = None
) -> dict[str, float]:
    """Returns rates and CPU times of the front over `seconds`, after a warm-up."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    num_sent, (pipe, end) = _processes.Value(c_int64, lock=False), _processes.Pipe()
    with tempfile.TemporaryDirectory(prefix="lf-", dir="/tmp") as folder:
        address = ipc_address(folder)
        engine = _processes.Process(target=run_engine, args=(address, rate, num_streams, num_sent))
        front = _processes.Process(target=run_front, args=(address, listener))
        port = listener.getsockname()[1]
        client = _processes.Process(target=run_client, args=(port, route, num_streams, num_tokens, end))
        try:
            for process in (engine, front, client):
                process.start()
            while _counts(front.pid, num_sent, pipe)[2] < 2 * num_streams:
                time.sleep(0.1)
            time.sleep(WARM_UP_S)
            before = _counts(front.pid, num_sent, pipe)
            if profile is not None:
                command = ["py-spy", "record", "--pid", str(front.pid), "-d", f"{seconds:.0f}", "-o", profile]
                subprocess.run(command, check=True)
            else:
                time.sleep(seconds)
            after = _counts(front.pid, num_sent, pipe)
        finally:
            for process in (client, front, engine):
                process.kill()
                process.join()
            listener.close()
    elapsed_s, tokens, events, answers, user_s, system_s = (b - a for a, b in zip(before, after, strict=True))
    return {
        "tokens_per_s": tokens / elapsed_s,
        "tokens_per_event": tokens / max(events, 1),
        "answers_per_s": answers / elapsed_s,
        "cores": (user_s + system_s) / elapsed_s,
        "cpu_us_per_token": 1e6 * (user_s + system_s) / tokens,
        "system_us_per_token": 1e6 * system_s / tokens,
    }


def _counts(pid: int | None, num_sent: Any, pipe: Connection) -> tuple[float, ...]:
    times = psutil.Process(pid).cpu_times()
    pipe.send(True)
    events, answers = pipe.recv()
    return time.monotonic(), num_sent.value, events, answers, times.user, times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=[*ROUTES])
    parser.add_argument("--rates", nargs="+", type=float, default=[4000.0, 20000.0, 40000.0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2000, help="of an answer")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--profile", help="file of the last case's profile")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(f"{given.streams} streams of {given.tokens} tokens, {os.cpu_count()} cores shared by all processes")
    print(f"{'route':12}{'rate':>8}{'tokens/s':>10}{'tokens/event':>14}{'cores':>7}{'us/token':>10}{'in kernel':>11}")
    results = []
    for route in given.routes:
        for rate in given.rates:
            row = measure(route, rate, given.streams, given.tokens, given.seconds, given.profile)
            results.append({"route": route, "rate": rate, **row})
            print(
                f"{route:12}{rate:8.0f}{row['tokens_per_s']:10.0f}{row['tokens_per_event']:14.2f}{row['cores']:7.2f}"
                f"{row['cpu_us_per_token']:10.1f}{row['system_us_per_token']:11.1f}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps({"arguments": vars(given), "results": results}, default=str, indent=1))


if __name__ == "__main__":
    main()
