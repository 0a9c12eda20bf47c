"""Measures how long an adapter takes from a trainer's memory until all replicas use it.

    python benchmarks/push_speed.py [--replicas 1 2] [--shape dense|moe|small] [--pushes 5]
    python benchmarks/push_speed.py --attach URL --shape 8b --streams 16    # a server of benchmarks/fleet.py, with GPUs

A server runs on CPUs, with a base of random weights that is made on the spot. Its layers are as many as those of an 8B
Llama and narrow, and the rank is high, so that an adapter has as many tensors and bytes as one of rank 16 of that model
has: 84 MB, or 1.4 GB on a mixture of experts (`--shape moe`). With `--shape small` it has 0.5 MB, which shows the time
that does not depend on the bytes. A client pushes new weights under one name with
AdminClient.push_tensors. The time is counted from the last byte that leaves the client until the answer, when all
replicas have loaded the version, requests use it, and it is durable. `send` is the time from the first byte to the
last.

Streams of the base run all the time. Their gaps are compared with those of the time before the pushes; trainer, server
and streams share the processors of one machine here. `--json FILE` writes the figures to a file. A running server must
have the admin key below and serve the base of the shape by the name `base`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from local_server import running
from lorafleet.client.admin import AdminClient
from random_llama import write_adapters, write_model
from serving import CONFIG as LLAMA_8B
from serving import DEMO

NAME, KEY, LAYERS, HIDDEN = "policy", "key-of-the-trainer", 32, 512
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 16,
    "head_dim": HIDDEN // 8,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# With the rank of the adapter.
SHAPES = {"dense": (DENSE, 184), "moe": (MOE, 368), "small": (DENSE, 1), "8b": (LLAMA_8B, 16)} | {
    "demo": (json.loads((DEMO / "config.json").read_text()), 8)
}
CONTEXT = 2048
STREAM = {"model": "base", "prompt": "w1 w2 w3", "max_tokens": 400, "ignore_eos": True, "stream": True}
QUIET_S = 5.0  # Seconds in which the streams run alone.
PAUSE_S = 1.0  # Seconds between two pushes.


class Push(NamedTuple):
    send_s: float  # From the first byte to the last.
    in_force_s: float  # From the last byte to the answer.
    gaps_s: list[float]  # Of all streams, from the first byte to the answer.


class Streams:
    """Requests that stream tokens of the base until stop(), and when the tokens came."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._stopping = False
        self._came: list[list[float]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(times,), daemon=True) for times in self._came]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Returns the gaps that ended between these times."""
        return [
            after - before for times in self._came for before, after in pairwise(times) if start_s <= after <= end_s
        ]

    def _run(self, times: list[float]) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopping:
                with client.stream("POST", f"{self._url}/v1/completions", json=STREAM) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            times.append(time.monotonic())
                        if self._stopping:
                            return


class Trainer:
    """Pushes new weights under one name."""

    def __init__(self, url: str, adapter: Path) -> None:
        self._config = json.loads((adapter / "adapter_config.json").read_text())
        content = (adapter / "adapter_model.safetensors").read_bytes()
        (head_bytes,) = struct.unpack("<Q", content[:8])
        self._head = content[: 8 + head_bytes]
        self._values = np.frombuffer(content, np.uint16, offset=8 + head_bytes).copy()
        self._first_s = self._last_s = 0.0
        self._client = AdminClient(url, KEY, on_upload=self._note)
        self.num_bytes = len(content)

    def push(self, streams: Streams) -> Push:
        self._values ^= 1  # The last bit of each bfloat16.
        self._values[0] += 2
        self._first_s = 0.0
        self._client.push_tensors(NAME, self._head + self._values.tobytes(), self._config)
        end_s = time.monotonic()
        gaps_s = streams.gaps(self._first_s, end_s)
        return Push(self._last_s - self._first_s, end_s - self._last_s, gaps_s)

    def _note(self, num_sent: int, num_bytes: int) -> None:
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        if num_sent == num_bytes:
            self._last_s = now_s


def write_adapter(folder: Path, shape: str) -> Path:
    """Writes the adapter whose weights are pushed, unless it is there."""
    config, rank = SHAPES[shape]
    adapters = folder / f"adapters-{shape}"
    if not adapters.exists():
        write_adapters(adapters, config, 1, rank)
    return adapters / "a0"


@contextmanager
def served(folder: Path, shape: str, replicas: int) -> Iterator[str]:
    """Starts a server on CPUs, and yields its URL."""
    config, rank = SHAPES[shape]
    model = folder / f"model-{shape}"
    if not model.exists():
        write_model(model, config)
    options = {
        "--model": model,
        "--served-model-name": "base",
        "--load-format": "dummy",
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--max-model-len": CONTEXT,
        "--kv-cache-tokens": 8 * CONTEXT,
        "--num-replicas": replicas,
        "--max-loras": 4,
        "--max-cpu-loras": 4,
        "--max-lora-rank": rank,
        "--catalog-uri": folder / f"catalogue-{shape}-{replicas}",
    }
    arguments = [str(part) for option in options.items() for part in option]
    with running([*arguments, "--admin-key", KEY], folder / "serve.log") as server:
        yield server.url


def measure(url: str, adapter: Path, pushes: int, streams: int) -> dict[str, float]:
    running_streams = Streams(url, streams)
    time.sleep(QUIET_S / 2)
    quiet_s = time.monotonic()
    time.sleep(QUIET_S)
    quiet = running_streams.gaps(quiet_s, time.monotonic())
    trainer = Trainer(url, adapter)
    done: list[Push] = []
    for _ in range(pushes):
        done.append(trainer.push(running_streams))
        time.sleep(PAUSE_S)
    running_streams.stop()
    gaps = [gap for push in done for gap in push.gaps_s]
    steady = done[1:] or done  # The first push also opens the connection.
    return {
        "megabytes": round(trainer.num_bytes / 1e6),
        "send_ms": round(statistics.median(push.send_s for push in steady) * 1e3),
        "in_force_ms": round(statistics.median(push.in_force_s for push in steady) * 1e3),
        "in_force_best_ms": round(min(push.in_force_s for push in steady) * 1e3),
        "in_force_worst_ms": round(max(push.in_force_s for push in steady) * 1e3),
        "gap_alone_ms": round(statistics.mean(quiet) * 1e3, 1) if quiet else 0.0,
        "gap_while_pushing_ms": round(statistics.mean(gaps) * 1e3, 1) if gaps else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="dense")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--attach", metavar="URL", help="use a server that runs already, instead of one on CPUs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.shape == "8b" and arguments.attach is None:
        parser.error("--shape 8b is too large for CPUs; give --attach as well")
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="push-speed-") as folder:
        adapter = write_adapter(Path(folder), arguments.shape)

        def add_row(url: str, **settings: float) -> None:
            row = settings | measure(url, adapter, arguments.pushes, arguments.streams)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)

        if arguments.attach is not None:
            add_row(arguments.attach)
        for replicas in arguments.replicas if arguments.attach is None else ():
            with served(Path(folder), arguments.shape, replicas) as url:
                add_row(url, replicas=replicas)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
