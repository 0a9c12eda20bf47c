"""Measures what decodes' attention takes on the GPU, in microseconds a layer, by each kernel that could compute it.

    python benchmarks/decode_attention.py [--cases 1x576 256x576 ...] [--kv fp8 bf16] [--layer llama-8b]
        [--columns wrapper xqa ...] [--json FILE]

A case is sequences x tokens of context, at the shape of an 8B Llama's layers (32 heads, 8 KV heads, head size 128) or
of --layer, with blocks of 16 tokens. All layers run in one CUDA graph, over caches that are larger together than the L2
cache. The columns are:

- wrapper: FlashInfer's tensor-core decode;
- xqa: FlashInfer's XQA as XQAAttention calls it;
- xqa 2x, xqa 4x: the same with each sequence split into two and four times as many parts;
- xqa exact: XQA's other kernel, which converts an FP8 cache and rounds no queries;
- triton: kernels/decoder/decode_attention.py;
- floor: reading the keys and values once at --bandwidth.

Behind each time is the relative difference of its result from the first column's, in percent. The last columns are the
host time of planning a captured step, in microseconds. A kernel that fails is shown as "failed", and why below the row.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import time
import traceback
from array import array
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.flashinfer_backend import WORKSPACE_BYTES, FlashInferGraphAttention
from lorafleet.workers.attention.kv_pages import BlockTables, KVPages
from lorafleet.workers.attention.triton_backend import TritonAttention
from lorafleet.workers.attention.xqa_attention import SEMAPHORE_BYTES, XQAAttention

BLOCK = 16
LAYERS = {
    "llama-8b": LayerAttention(32, 8, 128, 128**-0.5),
    "gpt-oss-20b": LayerAttention(64, 8, 64, 64**-0.5),
    "gpt-oss-20b-window": LayerAttention(64, 8, 64, 64**-0.5, window=128),
    "glm-4.5-air": LayerAttention(96, 8, 128, 128**-0.5),
    "gemma-4-full": LayerAttention(16, 1, 512, 1.0),
    "gemma-4-window": LayerAttention(16, 8, 256, 1.0, window=1024),
    "deepseek-v3": LayerAttention(128, 1, 576, 192**-0.5, value_dim=512, values_in_keys=True),
    "glm-4.7-flash": LayerAttention(20, 1, 576, 256**-0.5, value_dim=512, values_in_keys=True),
}
CASES = ["1x576", "8x576", "64x576", "256x576", "1x8192", "8x8192", "1x32768", "8x32768"]
COLUMNS = ["wrapper", "xqa", "xqa 2x", "xqa 4x", "xqa exact", "triton"]
PLANNED = ("wrapper", "xqa", "triton")  # columns whose time of a plan is shown
CACHE_BYTES = 2 << 30  # of all layers together, if MOST_LAYERS allow it
MOST_LAYERS = 64
REPLAYS, PLANS = 15, 50


@contextlib.contextmanager
def altered_xqa(column: str) -> Iterator[None]:
    """Makes FlashInfer's xqa() count more SMs, by which it splits sequences, or forget that this GPU is a Hopper."""
    module = importlib.import_module("flashinfer.xqa")
    if column.endswith("x"):
        count, factor = module.get_device_sm_count, int(column[-2])
        with mock.patch.object(module, "get_device_sm_count", lambda device: factor * count(device)):
            yield
    elif column == "xqa exact":
        with mock.patch.object(module, "get_compute_capability", return_value=(10, 0)):
            yield
    else:
        yield


class Bench:
    """Holds the caches and queries of one case, and what the wrapper has made of them."""

    def __init__(self, layer: LayerAttention, num_seqs: int, context: int, kv_dtype: torch.dtype) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        width = -(-context // BLOCK)
        seen = min(context, layer.window or context)
        self.layer_bytes = num_seqs * seen * layer.cached_numbers * kv_dtype.itemsize
        num_layers = max(2, min(MOST_LAYERS, CACHE_BYTES // self.layer_bytes + 1))
        self.spec = AttentionSpec(
            layers=(layer,) * num_layers,
            block_size=BLOCK,
            dtype=torch.bfloat16,
            kv_dtype=kv_dtype,
            device=device,
        )

        def cache() -> KVCache:
            shape = num_seqs * width, BLOCK, layer.num_kv_heads
            keys, values = (torch.randn(*shape, d, dtype=torch.bfloat16, device=device).to(kv_dtype) for d in sizes)
            return KVCache(keys, keys[..., : layer.out_dim] if layer.values_in_keys else values)

        sizes = layer.head_dim, layer.out_dim
        self.caches = [cache() for _ in range(num_layers)]
        order = torch.randperm(num_seqs * width).tolist()
        tables = [array("i", order[i * width : (i + 1) * width]) for i in range(num_seqs)]
        self.batch = AttentionBatch([1] * num_seqs, [context] * num_seqs, tables)
        self.q_THD = torch.randn(num_seqs, layer.num_heads, layer.head_dim, dtype=torch.bfloat16, device=device)
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.semaphores = torch.zeros(SEMAPHORE_BYTES // 4, dtype=torch.int32, device=device)
        self.memory = torch.zeros(KVPages.size(num_seqs, num_seqs * width), dtype=torch.int32, device=device)
        self.width = width
        self.expected: Tensor | None = None

    def backend(self, column: str) -> AttentionBackend:
        num_seqs = len(self.q_THD)
        if column == "wrapper":
            return FlashInferGraphAttention(self.spec, self.caches, self.workspace, self.memory, num_seqs)
        if column == "triton":
            return TritonAttention(self.spec, self.caches).for_graph(num_seqs, self.width * BLOCK)
        fixed = BlockTables.within(self.memory, num_seqs, self.width)
        return XQAAttention(self.spec, self.caches, self.workspace, self.semaphores, fixed)

    def measure(self, column: str) -> dict[str, float]:
        """Returns the time a layer, the error and, for the graphs' backends, the time of a plan."""
        backend = self.backend(column)
        backend.plan(self.batch)
        layers = range(len(self.caches))
        with altered_xqa(column):
            out_THD = backend.attend(0, self.q_THD)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for layer in layers:
                    backend.attend(layer, self.q_THD)
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(layers))
        found = out_THD.float()
        self.expected = found if self.expected is None else self.expected
        error = (found - self.expected).norm() / self.expected.norm()
        return {"us": statistics.median(times[2:]), "error": error.item(), "plan": self.plan_us(backend)}

    def plan_us(self, backend: AttentionBackend) -> float:
        times = []
        for _ in range(PLANS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            backend.plan(self.batch)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6


def measure_case(case: str, kv: str, layer: str, columns: list[str], bandwidth: float) -> dict[str, object]:
    num_seqs, context = map(int, case.split("x"))
    bench = Bench(LAYERS[layer], num_seqs, context, FP8 if kv == "fp8" else torch.bfloat16)
    found: dict[str, dict[str, float]] = {}
    failures = []
    for column in columns:
        if column == "xqa exact" and kv != "fp8":
            continue  # it is the only kernel for other caches
        try:
            found[column] = bench.measure(column)
        except Exception:
            failures.append(f"{column}: {traceback.format_exc(limit=-3)}")
    floor = bench.layer_bytes / bandwidth / 1e6
    line = f"{kv:>4} {case:>8}"
    for column in columns:
        text = f"{found[column]['us']:.1f} ({found[column]['error'] * 100:.1f})" if column in found else "failed"
        line += f"{'-' if column == 'xqa exact' and kv != 'fp8' else text:>16}"
    plans = "".join(f"{found[c]['plan']:14.0f}" if c in found else f"{'-':>14}" for c in PLANNED)
    print(f"{line}{floor:10.1f}{plans}", *failures, sep="\n", flush=True)
    return {"kv": kv, "case": case, "layer": layer, "floor": floor, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--kv", nargs="+", choices=["fp8", "bf16"], default=["fp8", "bf16"])
    parser.add_argument("--layer", choices=list(LAYERS), default="llama-8b")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--bandwidth", type=float, default=4.25, help="TB/s, of a copy on an H200")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    header = "".join(f"{name:>16}" for name in args.columns)
    plans = "".join(f"{f'plan {name}':>14}" for name in PLANNED)
    print(f"{'':13}{header}{'floor':>10}{plans}", flush=True)
    with torch.inference_mode():
        pairs = [(case, kv) for kv in args.kv for case in args.cases]
        rows = [measure_case(case, kv, args.layer, args.columns, args.bandwidth) for case, kv in pairs]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
