"""Measures the host time of planning a step's attention, in microseconds.

    python benchmarks/attention_plan.py [--batches 1 8 64 256] [--json FILE]

The backend is FlashInfer at an 8B Llama's shape with one kind of layer. Sequences have 512 to 1023 tokens of context,
and one more with each step. The columns are:

- graph: plan() of a captured decode step;
- eager: plan() of the same step without a graph;
- mixed: plan() of a step that also prefills 512 tokens;
- busy: plan() of a graph while the device is busy for about 30 ms, which plan() must not wait for.

The figures are medians of 200 plans, and of 5 plans for the busy device.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from pathlib import Path

import torch

from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.flashinfer_backend import FlashInferAttention

STEPS, WARM_UP, BLOCK, MAX_CONTEXT, CHUNK = 200, 20, 16, 8192, 512
NUM_BLOCKS = 64 * 1024
BUSY_CYCLES = 50_000_000


def batches(count: int, steps: int) -> list[AttentionBatch]:
    rng = random.Random(count)
    lens = [rng.randrange(512, 1024) for _ in range(count)]
    tables = [array("i", (rng.randrange(NUM_BLOCKS) for _ in range(128))) for _ in range(count)]
    return [AttentionBatch([1] * count, [length + step for length in lens], tables) for step in range(steps)]


def with_prefill(batch: AttentionBatch) -> AttentionBatch:
    blocks = array("i", range(-(-CHUNK // BLOCK)))
    return AttentionBatch([*batch.query_lens, CHUNK], [*batch.context_lens, CHUNK], [*batch.block_tables, blocks])


def host_us(backend: AttentionBackend, steps: list[AttentionBatch], busy: bool = False) -> float:
    taken = []
    for step in steps:
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(BUSY_CYCLES)
        started = time.perf_counter()
        backend.plan(step)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[min(WARM_UP, len(taken) // 2) :]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = AttentionSpec(
        layers=(LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),),
        block_size=BLOCK,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    shape = (2, 1, BLOCK, 8, 128)  # Plans never read the cache.
    cache = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
    eager = FlashInferAttention(spec, [KVCache(cache[0], cache[1])])
    rows = []
    print("batch   graph us   eager us   mixed us    busy us")
    for count in args.batches:
        graph = eager.for_graph(count, MAX_CONTEXT)
        steps = batches(count, STEPS)
        row = {
            "batch": count,
            "graph": host_us(graph, steps),
            "eager": host_us(eager, steps),
            "mixed": host_us(eager, [with_prefill(step) for step in steps]),
            "busy": host_us(graph, steps[:5], busy=True),
        }
        rows.append(row)
        print("".join(f"{value:{5 if name == 'batch' else 11}.0f}" for name, value in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
