"""Measures single requests in the first minute after a start, when idle time is used for what the start left for later.

    python benchmarks/first_minute.py [--seconds 60] [--gap-s 0.25] [--adapters 8] [--mixture] [--json FILE]

The engine runs in a process of its own, as a server's worker does, with random weights in the shape of an 8B Llama, or
with --mixture in that of Qwen3-30B-A3B. This process sends requests over the engine's socket, one at a time, at random
times, for adapters in turn: a prompt of 64 tokens and an answer of 16. Each request waits for its first token behind
whatever the engine does at that moment: captures of CUDA graphs, a change of the attention, a compiler's work.

A row for each ten seconds has the time to first token and the gaps between tokens, in milliseconds. At the end the same
requests are sent once more after the idle work has been finished: this is what they should have taken all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import moe_engine
from engine_setup import llama_config
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineHello, EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.transport.engine_socket import EngineClient, ipc_address
from random_llama import write_alike_adapters

PROMPT, ANSWER, RANK = 64, 16, 16
WINDOW_S = 10.0
SETTLED_S = 10.0  # Duration of the requests after the idle work.
SETTLE_S = 300.0  # Longest wait for the end of the idle work.
QUIET_S = 3.0  # The idle work has ended if the number of graphs has not changed for so long.


@dataclass(slots=True)
class Window:
    """The requests of one period, in seconds."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Returns the figures in milliseconds."""
        row: dict[str, float] = {"requests": len(self.first_s)}
        for name, values in (("ttft", self.first_s), ("gap", self.gaps_s)):
            for label, percent in (("p50", 50), ("p99", 99), ("max", 100)):
                row[f"{name}_{label}"] = round(1e3 * float(np.percentile(values, percent)), 1) if values else 0.0
        return row


def serve(config: EngineConfig, address: str, pipe: Connection, mixture: bool) -> None:
    """Runs the worker until the other end of the pipe is closed."""
    import logging

    from lorafleet.workers import model_loading
    from lorafleet.workers.worker import GPUWorker

    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    if mixture:
        model_loading.fill_randomly = moe_engine.fill_alike
    worker = GPUWorker(config, address)
    pipe.send_bytes(msgspec.msgpack.encode(worker.hello()))
    try:
        pipe.recv_bytes()
    except EOFError:
        worker.shutdown()


async def ask(client: EngineClient, name: str, lora: LoRARequest, vocabulary: int, window: Window) -> None:
    """Sends one request, and adds its times to the window. Raises RuntimeError if it fails."""
    prompt = [random.randrange(10, vocabulary - 256) for _ in range(PROMPT)]
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    request = EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, lora=lora)
    last_s, is_first = time.perf_counter(), True
    async for output in client.generate(request):
        if output.error is not None:
            raise RuntimeError(f"{name}: {output.error}")
        now_s = time.perf_counter()
        (window.first_s if is_first else window.gaps_s).append(now_s - last_s)
        last_s, is_first = now_s, False


async def ask_for(
    client: EngineClient, name: str, loras: Sequence[LoRARequest], vocabulary: int, seconds: float, gap_s: float
) -> list[Window]:
    """Sends single requests at random times for so many seconds. Returns one window for each WINDOW_S."""
    windows: list[Window] = []
    began_s, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        while len(windows) <= elapsed_s / WINDOW_S:
            windows.append(Window())
        await ask(client, f"{name} {count}", loras[count % len(loras)], vocabulary, windows[-1])
        count += 1
        await asyncio.sleep(random.expovariate(1 / gap_s))
    return windows


async def settled(client: EngineClient) -> None:
    """Waits until the engine has no idle work left."""
    deadline_s, graphs, since_s = time.monotonic() + SETTLE_S, -1, time.monotonic()
    while time.monotonic() < deadline_s:
        stats = await client.next_stats()
        if stats.decode_graphs != graphs or stats.attention_waits:
            graphs, since_s = stats.decode_graphs, time.monotonic()
        if time.monotonic() - since_s > QUIET_S:
            return


def report(name: str, windows: Sequence[Window]) -> dict[str, Any]:
    """Prints the figures of all these windows together, and returns them."""
    row = Window([s for w in windows for s in w.first_s], [s for w in windows for s in w.gaps_s]).row()
    print(
        f"{name:>9}: {row['requests']:4.0f} requests, time to first token p50 {row['ttft_p50']:6.1f} "
        f"p99 {row['ttft_p99']:6.1f} max {row['ttft_max']:6.1f} ms; gaps p50 {row['gap_p50']:5.1f} "
        f"p99 {row['gap_p99']:6.1f} max {row['gap_max']:6.1f} ms",
        flush=True,
    )
    return {"window": name, **row}


async def measure(
    address: str, hello: EngineHello, paths: Sequence[Path], args: argparse.Namespace
) -> list[dict[str, Any]]:
    client = await EngineClient.connect(address, hello)
    loras = []
    for i, path in enumerate(paths):
        lora = LoRARequest(path.name, i + 1, str(path))
        info = await client.load_adapter(lora)
        loras.append(msgspec.structs.replace(lora, digest=info.digest))
    windows = await ask_for(client, "first", loras, hello.vocab_size, args.seconds, args.gap_s)
    rows = [report(f"{WINDOW_S * i:.0f} s", [window]) for i, window in enumerate(windows)]
    rows.append(report("all of it", windows))
    stats = client.stats
    print(f"graphs {stats.decode_graphs}, attention switched: {stats.attention_switched_s > 0}", flush=True)
    await settled(client)
    print(f"settled: graphs {client.stats.decode_graphs}", flush=True)
    rows.append(report("settled", await ask_for(client, "settled", loras, hello.vocab_size, SETTLED_S, args.gap_s)))
    await client.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gap-s", type=float, default=0.25, help="mean time between an answer and the next request")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--mixture", action="store_true", help="Qwen3-30B-A3B's shape, adapters on experts")
    parser.add_argument("--attention-backend", default="auto")
    for name, default in (("layers", 32), ("hidden", 4096), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model = moe_engine.CONFIG | {"num_hidden_layers": args.layers} if args.mixture else llama_config(args, 8192)
        (folder / "config.json").write_text(json.dumps(model))
        paths = write_alike_adapters(folder / "adapters", model, args.adapters, RANK, experts=args.mixture)
        config = EngineConfig(
            str(folder),
            device=args.device,
            load_format="dummy",
            attention_backend=args.attention_backend,
            kv_cache_tokens=8192 if args.device == "cpu" else None,
            enable_prefix_caching=False,
            lora=LoRAConfig(max_loras=args.adapters, max_lora_rank=RANK, max_cpu_loras=args.adapters),
        )
        address = ipc_address(root)
        pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=serve, args=(config, address, other, args.mixture))
        process.start()
        other.close()
        hello = msgspec.msgpack.decode(pipe.recv_bytes(), type=EngineHello)
        rows = asyncio.run(measure(address, hello, paths, args))
        pipe.close()
        process.join(60)
    if args.json:
        args.json.write_text(json.dumps({"mixture": args.mixture, "layers": args.layers, "rows": rows}))


if __name__ == "__main__":
    main()
