"""Measures the cost of traces in a replica's front: CPU time per streamed request of 100 tokens, by sampling ratio.

    python benchmarks/tracing_cpu.py [--model demo/model] [--requests 300] [--rounds 5]

The application runs in this process with an engine that answers instantly; the collector runs in another process. The
figures include the exporter's thread. The ratios, one of which is off, take turns, since other work on the machine
affects all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection

import httpx

from http_frontend import BODY, InstantEngine, NoAdapters
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.telemetry.tracing import Tracing
from lorafleet.api.text.tokenizer import Tokenizer

RATIOS = (None, 0.0, 0.01, 0.1, 1.0)


def collect(port: Connection) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        port.send(server.server_address[1])
        server.serve_forever()


async def ms_a_request(front: AppState, endpoint: str, ratio: float | None, num_requests: int) -> float:
    tracing = None if ratio is None else Tracing(endpoint, ratio, "benchmark")
    api = build_api(lambda: front, (), tracing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://localhost") as client:
        await client.post("/v1/completions", json=BODY)
        began = time.process_time()
        for _ in range(num_requests):
            (await client.post("/v1/completions", json=BODY)).raise_for_status()
        if tracing is not None:
            tracing.close()
        return (time.process_time() - began) / num_requests * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    collector = context.Process(target=collect, args=(sender,), daemon=True)
    collector.start()
    endpoint = f"http://127.0.0.1:{receiver.recv()}/v1/traces"
    config = FrontConfig(served_model_names=("base",), model_path=options.model)
    front = make_state(config, Tokenizer.from_folder(options.model), InstantEngine(), NoAdapters())
    seen: dict[float | None, list[float]] = {ratio: [] for ratio in RATIOS}
    for _ in range(options.rounds):
        for ratio in RATIOS:
            seen[ratio].append(asyncio.run(ms_a_request(front, endpoint, ratio, options.requests)))
    for ratio, found in seen.items():
        added = statistics.median(ms - off for ms, off in zip(found, seen[None], strict=True))
        print(f"ratio {'off' if ratio is None else ratio}: {statistics.median(found):.3f} ms per request, {added:+.3f}")
    collector.terminate()
    front.close()


if __name__ == "__main__":
    main()
