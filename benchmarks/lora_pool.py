"""Measures what it costs that adapters borrow memory of the KV cache, beside running steps.

    python benchmarks/lora_pool.py [--adapters 24] [--rank 64] [--streams 32] [--fixed]

The model has the shape of an 8B Llama with random weights. While streams of the base decode, one adapter after another
is requested, in two passes over all of them. All are in host memory. It prints the time to the first token of their
requests, the gaps of the streams during each pass, and how much memory has moved. With --fixed, adapters and KV blocks
have fixed shares of memory, for comparison. On a CPU they always have.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

from engine_driver import abort, good_outputs, load, submit, until_all_answer
from engine_setup import add_shape_arguments, llama_config
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from random_llama import write_alike_adapters

PROMPT, MAX_LENGTH = 64, 8192


def make(folder: Path, args: argparse.Namespace) -> tuple[Engine, list[LoRARequest]]:
    model = llama_config(args, MAX_LENGTH)
    (folder / "config.json").write_text(json.dumps(model))
    lora = LoRAConfig(
        max_loras=args.max_loras,
        max_lora_rank=args.rank,
        max_cpu_loras=args.adapters,
        share_lora_memory=not args.fixed and args.device == "cuda",
    )
    config = EngineConfig(
        str(folder),
        device=args.device,
        load_format="dummy",
        max_num_seqs=args.streams + 8,
        attention_backend=args.attention_backend,
        lora=lora,
    )
    engine = build_engine(config)
    gc.collect()
    gc.freeze()
    return engine, load(engine, write_alike_adapters(folder / "adapters", model, args.adapters, args.rank))


def visit(engine: Engine, name: str, loras: list[LoRARequest]) -> tuple[list[float], list[float]]:
    """Requests each adapter in turn. Returns the milliseconds to each first token, and between the steps."""
    first_ms, gaps_ms = [], []
    last = time.perf_counter()
    for i, lora in enumerate(loras):
        submit(engine, f"{name} {i}", 1, PROMPT, 4, [lora])
        began, ends = time.perf_counter(), 0
        while ends == 0:
            for output in good_outputs(engine):
                if output.request_id.startswith(f"{name} {i} "):
                    if len(first_ms) == i:
                        first_ms.append((time.perf_counter() - began) * 1e3)
                    ends += output.finish_reason is not None
            now = time.perf_counter()
            gaps_ms.append((now - last) * 1e3)
            last = now
    return first_ms, gaps_ms


def shown(values_ms: list[float]) -> str:
    ordered = sorted(values_ms)
    return f"{statistics.median(ordered):.2f} / {ordered[int(0.99 * len(ordered))]:.2f} / {ordered[-1]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    parser.add_argument("--attention-backend", choices=("auto", "triton", "flashinfer"), default="auto")
    parser.add_argument("--adapters", type=int, default=24)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--max-loras", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--fixed", action="store_true", help="fixed shares of memory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine, loras = make(Path(folder), args)
        submit(engine, "stream", args.streams, PROMPT, MAX_LENGTH - PROMPT, [])
        until_all_answer(engine, "stream", args.streams)
        print("the streams run", flush=True)
        visit(engine, "first", loras[:1])  # the first steps with an adapter may compile kernels
        for name in ("pass 1", "pass 2"):
            first_ms, gaps_ms = visit(engine, name, loras[1:])
            stats = engine.stats()
            print(
                f"{name}: first token {shown(first_ms)} ms, gaps {shown(gaps_ms)} ms (p50 / p99 / most); "
                f"{stats.lora_slots_used} adapters in slots, {stats.lora_memory_borrowed_bytes / 2**30:.2f} GiB "
                f"borrowed, moves {dict(stats.lora_memory_moves_total)}, {stats.lora_activations_total} copies",
                flush=True,
            )
        abort(engine, "stream", args.streams)
        engine.close()


if __name__ == "__main__":
    main()
