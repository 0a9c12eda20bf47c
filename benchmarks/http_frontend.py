"""Measures the overhead of the HTTP front: 64 clients stream 100 tokens each from an engine that answers instantly.

    python benchmarks/http_frontend.py [--clients 64] [--seconds 10]

Three servers run in turn, each in a process of its own:

- `bare` is a uvicorn/FastAPI SSE server that sends 100 prepared chunks;
- `direct` is the real front in a Serve replica behind HAProxy;
- `plain` is the same replica behind Serve's own proxy.

It prints requests per second, server CPU time per request, and the ratios to `bare`, and writes
benchmarks/results/http_frontend.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from local_server import cpu_s
from lorafleet.protocol.errors import ModelNotFound
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import AdapterMove, EngineHello, EngineRequest, EngineStats, TokenOutput
from lorafleet.protocol.transport.unread_outputs import IsStalled, never_stalled

NUM_TOKENS = 100
ROLES = ("InstantReplica", "AdapterRouter", "haproxy")
PORT = 8765
ROOT = Path(__file__).resolve().parent.parent
BODY = {"model": "base", "prompt": "Hello", "max_tokens": NUM_TOKENS, "stream": True}
CHUNK = {
    "id": "cmpl-0",
    "object": "text_completion",
    "created": 0,
    "model": "base",
    "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
}
END_OF_BODY = b"0\r\n\r\n"


class InstantEngine:
    """Has the interface of EngineClient in protocol/transport/engine_socket.py; every token is available at once."""

    def __init__(self) -> None:
        self.hello = EngineHello(vocab_size=32_000, max_model_len=8192, kv_cache_tokens=1 << 20, eos_token_ids=[])
        self.stats = EngineStats()
        self.dead: str | None = None

    def listen_to_moves(self, _: Callable[[AdapterMove], None]) -> None:
        """Ignores the listener, as this engine loads nothing."""

    async def generate(
        self,
        request: EngineRequest,
        is_stalled: IsStalled = never_stalled,  # noqa: ARG002
    ) -> AsyncGenerator[TokenOutput, None]:
        for number in range(1, NUM_TOKENS + 1):
            reason = "length" if number == NUM_TOKENS else None
            yield TokenOutput(request_id=request.request_id, token_ids=[40], finish_reason=reason)

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        raise NotImplementedError

    async def drop_adapter(self, digest: str) -> None:
        raise NotImplementedError


class NoAdapters:
    list_version = None

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:  # noqa: ARG002  # There are no adapters.
        return []

    async def resolve(self, name: str, key: str | None = None, group: str = "") -> LoRARequest:  # noqa: ARG002  # There are no adapters.
        raise ModelNotFound(name)

    async def add(
        self, name: str, path: str, *, load_inplace: bool, limits: object = None, within: str | None = None
    ) -> LoRARequest:
        raise NotImplementedError

    async def remove(self, name: str) -> None:
        raise NotImplementedError


class InstantReplica:
    """Replaces EngineReplica of cluster/serve/replica.py: it has the same front and ASGI entry, but no worker."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __serve_build_asgi_app__(self) -> FastAPI:
        from lorafleet.api.app_state import make_state
        from lorafleet.api.front_config import FrontConfig
        from lorafleet.api.routes.build_api import build_api
        from lorafleet.api.text.tokenizer import Tokenizer

        config = FrontConfig(served_model_names=("base",), model_path=self._model)
        front = make_state(config, Tokenizer.from_folder(self._model), InstantEngine(), NoAdapters())
        return build_api(lambda: front)


def serve_bare() -> None:
    chunks = [f"data: {json.dumps(CHUNK)}\n\n".encode()] * NUM_TOKENS + [b"data: [DONE]\n\n"]
    api = FastAPI()

    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    @api.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        await request.json()
        return StreamingResponse(stream(), media_type="text/event-stream")

    uvicorn.run(api, port=PORT, log_level="error", access_log=False)


def serve_with_ray(model: str, run_dir: str, *, direct: bool) -> None:
    """Serves until it is killed. The deployments are made as in cluster/serve/app.py."""
    from lorafleet.cluster.serve import serve_environment

    serve_environment.prepare(run_dir, direct_streaming=direct)
    if direct:
        serve_environment.open_ingress(run_dir, "127.0.0.1", None)
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from lorafleet.cluster.proxy import ingress
    from lorafleet.cluster.routing.router import AffinityRouter
    from lorafleet.cluster.serve import app

    ray.init(address="local", include_dashboard=False, num_cpus=8, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    directory = {
        "model": model,
        "catalog_uri": f"{run_dir}/catalogue",
        "base_names": ("base",),
        "fill_cpu_loras": False,
    }
    replicas = serve.deployment(
        name="InstantReplica",
        max_ongoing_requests=1024,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=app.QUIET,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter,  # type: ignore[arg-type]  # cluster/serve/app.py does the same.
            request_router_kwargs={"directory": directory, "routing": "affinity"},
        ),
    )(serve.ingress()(InstantReplica)).bind(model)
    serve.run(ingress.with_ingress_router(replicas, app.router().bind(replicas)) if direct else replicas)
    signal.pause()


class Client(asyncio.Protocol):
    """Keeps one connection, and sends the next request as soon as an answer is complete."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._num_events = 0
        self.num_answers = 0
        self.failed = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._num_events += data.count(b"data: ")
        if data.endswith(END_OF_BODY):
            if self._num_events < NUM_TOKENS:
                self.failed = f"{self._num_events} events, of which the last is {data[:300]!r}"
            self._num_events = 0
            self.num_answers += 1
            self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        """Records a failure, except between two answers, where HAProxy may close when its configuration changes."""
        if exc is not None or self._num_events:
            self.failed = f"connection lost after {self._num_events} events: {exc}"
        else:
            self._connecting = asyncio.get_running_loop().create_task(self.connect())

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", PORT)


async def load(num_clients: int, seconds: float) -> dict[str, float]:
    """Returns the number of answers and the seconds that they took, after a warm-up of a fifth of the time."""
    body = json.dumps(BODY).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    clients = [Client(f"{head}\r\n\r\n".encode() + body) for _ in range(num_clients)]
    for client in clients:
        await client.connect()
    await asyncio.sleep(seconds / 5)
    print("measure", flush=True)
    started, before = time.perf_counter(), sum(client.num_answers for client in clients)
    await asyncio.sleep(seconds)
    answers, elapsed = sum(client.num_answers for client in clients) - before, time.perf_counter() - started
    failed = next((client.failed for client in clients if client.failed), "")
    assert not failed, failed
    return {"requests": answers, "seconds": elapsed, "client_cpu_s": time.process_time()}


def measure(arguments: argparse.Namespace, server: str) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="lf-", dir="/tmp", ignore_cleanup_errors=True) as run_dir,
        _child(arguments, "--serve", server, "--run-dir", run_dir) as process,
    ):
        _wait_until_it_answers(process)
        with _child(arguments, "--load") as loader:
            assert loader.stdout is not None
            loader.stdout.readline()
            before = cpu_s(process.pid, ROLES)
            result: dict[str, float] = json.loads(loader.stdout.readline())
            spent = cpu_s(process.pid, ROLES)
            spent.subtract(before)
    used_s = spent.total()
    return {
        "requests_per_s": result["requests"] / result["seconds"],
        "server_cpu_ms_per_request": 1000 * used_s / result["requests"],
        "server_cores": used_s / result["seconds"],
        "client_cores": result["client_cpu_s"] / (1.2 * result["seconds"]),
        "cpu_ms_by_process": {name: round(1000 * seconds / result["requests"], 3) for name, seconds in spent.items()},
    }


@contextlib.contextmanager
def _child(arguments: argparse.Namespace, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, __file__, "--clients", str(arguments.clients), "--seconds", str(arguments.seconds)]
    process = subprocess.Popen([*command, "--model", arguments.model, *more], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        time.sleep(1)


def _wait_until_it_answers(process: subprocess.Popen[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=BODY, timeout=30).status_code == 200:
                return
        time.sleep(0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--model", default=str(ROOT / "demo" / "model"), help="folder with the tokenizer")
    parser.add_argument("--only", choices=("bare", "direct", "plain"))
    parser.add_argument("--serve", choices=("bare", "direct", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(uvloop.run(load(arguments.clients, arguments.seconds))), flush=True)
    elif arguments.serve == "bare":
        serve_bare()
    elif arguments.serve:
        serve_with_ray(arguments.model, arguments.run_dir, direct=arguments.serve == "direct")
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    servers = [arguments.only] if arguments.only else ["bare", "direct", "plain"]
    num_cores = os.cpu_count() or 1
    print(
        f"{arguments.clients} clients, {NUM_TOKENS} tokens per stream, {num_cores} cores shared by clients and servers"
    )
    print(
        f"{'server':8}{'requests/s':>12}{'x bare':>8}{'CPU ms/request':>16}{'server cores':>14}{'client cores':>14}"
        "  CPU ms/request by process"
    )
    results: dict[str, Any] = {}
    for server in servers:
        row = results[server] = measure(arguments, server)
        row["ratio_to_bare"] = row["requests_per_s"] / results.get("bare", row)["requests_per_s"]
        print(
            f"{server:8}{row['requests_per_s']:12.0f}{row['ratio_to_bare']:8.2f}"
            f"{row['server_cpu_ms_per_request']:16.2f}{row['server_cores']:14.2f}{row['client_cores']:14.2f}  "
            f"{row['cpu_ms_by_process']}",
            flush=True,
        )
    target = ROOT / "benchmarks" / "results" / "http_frontend.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"cores": num_cores, "clients": arguments.clients, "servers": results}, indent=2))


if __name__ == "__main__":
    main()
