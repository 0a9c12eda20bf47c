"""Measures the whole engine at 8B shape with random weights: milliseconds per decode step, prefill tokens per second.

    python benchmarks/engine_e2e.py [--batches 1 8 64 256] [--adapters 0 8 64] [--mixed-tokens 512]
        [--quantization none nf4 int4 fp8] [--kv-cache-dtype auto|fp8] [--lora-dtype auto|fp8] [--json FILE]

Prompts have 512 random tokens and answers 128 tokens. The model runs in bf16 and samples greedily, with adapters of
rank 16 on all seven projections; request i uses adapter i modulo their number. A step is timed on the host from the
scheduler to the tokens, as a server experiences it. The result is the median of the steps in which every sequence
decodes. The byte floor is the time to read the weights, the batch's distinct adapters and the KV cache once, at the
copy bandwidth measured in the same run. Prefill is the time from submitting all prompts to the first token of the last
one, in steps of 8192 tokens, whether or not a step also decodes.

--quantization: repeats everything for each of these values in one run; the value none keeps bf16.

--mixed-tokens: for each value of max_num_mixed_tokens, a prompt of 8000 tokens then arrives amid 32 streams, which use
32 adapters. The results are the time until its first token and the gaps of the streams until then.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmark_results import Case, Value, write_results
from engine_driver import (
    abort,
    copy_bandwidth,
    decode_step_ms,
    load,
    prefill_tokens_per_s,
    settle,
    submit,
    until_all_answer,
)
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from random_llama import write_alike_adapters

PROMPT, GENERATED, RANK = 512, 128, 16
STREAMS, LONG_PROMPT = 32, 8000
PREFILL_TOKENS = 8192  # The most tokens in one step.
HIDDEN, INNER, LAYERS, KV = 4096, 14336, 32, 1024
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
ADAPTER_NUMBERS = LAYERS * RANK * sum(i + o for i, o in SHAPES.values())
KV_NUMBERS_A_TOKEN = 2 * LAYERS * KV


UNITS = {
    "step_ms": "ms, median",
    "prefill_tokens_per_s": "tokens/s",
    "floor_ms": "ms",
    "copy_bytes_per_s": "bytes/s",
    "first_token_ms": "ms",
    "median_gap_ms": "ms",
    "longest_gap_ms": "ms",
}


@dataclass(frozen=True, slots=True)
class Measured:
    quantization: str
    batch: int
    adapters: int
    step_ms: float
    prefill_tokens_per_s: float
    floor_ms: float

    def result(self, bandwidth: float, args: argparse.Namespace) -> Case:
        settings: dict[str, Value] = {"batch": self.batch, "adapters": self.adapters}
        figures = {"step_ms": self.step_ms, "prefill_tokens_per_s": self.prefill_tokens_per_s}
        figures |= {"floor_ms": self.floor_ms, "copy_bytes_per_s": bandwidth}
        return Case(settings | _precisions(self.quantization, args), figures)


def measure(
    engine: Engine, quantization: str, batch: int, loras: list[LoRARequest], bandwidth: float, weights: int
) -> Measured:
    repeats = 5 if batch * PROMPT <= PREFILL_TOKENS else 2
    prefill = prefill_tokens_per_s(engine, batch, PROMPT, GENERATED, loras, repeats)
    step_ms = decode_step_ms(engine, batch, PROMPT, GENERATED, loras)
    distinct = min(batch, len(loras))
    kv_bytes = KV_NUMBERS_A_TOKEN * engine.runner.steps.caches[0].k_NPGD.element_size()
    kv = batch * (PROMPT + GENERATED / 2) * kv_bytes
    adapter_bytes = ADAPTER_NUMBERS * (engine.loras.model_manager.dtype.itemsize if engine.loras is not None else 0)
    floor_ms = (weights + distinct * adapter_bytes + kv) / bandwidth * 1e3
    return Measured(quantization, batch, len(loras), step_ms, prefill, floor_ms)


@dataclass(frozen=True, slots=True)
class Mixed:
    quantization: str
    mixed_tokens: int
    adapters: int
    first_token_ms: float
    median_gap_ms: float
    longest_gap_ms: float

    def result(self, args: argparse.Namespace) -> Case:
        settings: dict[str, Value] = {"mixed_tokens": self.mixed_tokens, "adapters": self.adapters}
        figures = {"first_token_ms": self.first_token_ms, "median_gap_ms": self.median_gap_ms}
        figures |= {"longest_gap_ms": self.longest_gap_ms}
        return Case(settings | _precisions(self.quantization, args), figures)


def _precisions(quantization: str, args: argparse.Namespace) -> dict[str, Value]:
    return {"quantization": quantization, "kv_cache_dtype": args.kv_cache_dtype, "lora_dtype": args.lora_dtype}


def measure_mixed(engine: Engine, quantization: str, mixed_tokens: int, loras: list[LoRARequest]) -> Mixed:
    row = None
    for repeat in ("warm-up", "measured"):
        streams, long = f"stream {repeat}", f"long {repeat}"
        submit(engine, streams, STREAMS, PROMPT, 1000, loras)
        until_all_answer(engine, streams, STREAMS)
        submit(engine, long, 1, LONG_PROMPT, 2, loras)
        times, answered = [time.perf_counter()], False
        while not answered:
            asked = [output.request_id for output in engine.step()]
            if any(name.startswith(streams) for name in asked):
                times.append(time.perf_counter())
            answered = any(name.startswith(long) for name in asked)
        gaps = [(after - before) * 1e3 for before, after in pairwise(times)]
        row = Mixed(
            quantization, mixed_tokens, len(loras), (times[-1] - times[0]) * 1e3, statistics.median(gaps), max(gaps)
        )
        engine.abort(f"{long} 0")
        abort(engine, streams, STREAMS)
    assert row is not None
    return row


def start(
    checkpoint: Path, max_num_seqs: int, mixed_tokens: int, quantization: str, args: argparse.Namespace
) -> tuple[Engine, list[LoRARequest]]:
    """Returns an engine with as many adapters as are measured."""
    gc.collect()  # Frees the previous engine.
    torch.cuda.empty_cache()
    most = max(args.adapters)
    config = EngineConfig(
        model=str(checkpoint),
        device="cuda",
        load_format="dummy",
        quantization=None if quantization == "none" else quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=PREFILL_TOKENS,
        max_num_mixed_tokens=mixed_tokens,
        max_gap_ms=10_000,
        enable_prefix_caching=False,
        lora=LoRAConfig(max_loras=most, max_lora_rank=RANK, max_cpu_loras=most, lora_dtype=args.lora_dtype)
        if most
        else None,
    )
    engine = build_engine(config)
    if not most:
        settle(engine)
        return engine, []
    folder = checkpoint.parent / "adapters"
    paths = sorted(folder.iterdir()) if folder.exists() else write_alike_adapters(folder, CONFIG, most, RANK)
    return engine, load(engine, paths)


def run_batches(checkpoint: Path, quantization: str, args: argparse.Namespace, bandwidth: float) -> list[Measured]:
    engine, loras = start(checkpoint, max(args.batches), PREFILL_TOKENS, quantization, args)
    model = engine.runner.steps.model
    read = sum(p.numel() * p.element_size() for p in model.parameters()) - model.embed_tokens.weight.nbytes
    print(
        f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, "
        f"quantization {quantization}, weights read a step {read / 2**30:.2f} GiB, "
        f"KV cache {engine.hello.kv_cache_tokens} tokens of {engine.runner.steps.caches[0].k_NPGD.dtype}"
    )
    print("batch  adapters  ms a step   floor ms   prefill tokens/s")
    rows = []
    for count in args.adapters:
        for batch in args.batches:
            row = measure(engine, quantization, batch, loras[:count], bandwidth, read)
            rows.append(row)
            print(
                f"{row.batch:5}  {row.adapters:8}  {row.step_ms:9.2f}  {row.floor_ms:9.2f}  "
                f"{row.prefill_tokens_per_s:17.0f}",
                flush=True,
            )
    engine.close()
    return rows


def run_mixed(checkpoint: Path, quantization: str, args: argparse.Namespace) -> list[Mixed]:
    print(f"a prompt of {LONG_PROMPT} tokens amid {STREAMS} streams, quantization {quantization}")
    print("mixed tokens  adapters  first token ms  median gap ms  longest gap ms")
    rows = []
    for tokens in args.mixed_tokens:
        engine, loras = start(checkpoint, STREAMS + 1, tokens, quantization, args)
        for count in args.adapters:
            row = measure_mixed(engine, quantization, tokens, loras[:count])
            rows.append(row)
            print(
                f"{row.mixed_tokens:12}  {row.adapters:8}  {row.first_token_ms:14.0f}  {row.median_gap_ms:13.1f}  "
                f"{row.longest_gap_ms:14.1f}",
                flush=True,
            )
        engine.close()
    return rows


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 8, 64])
    parser.add_argument("--quantization", nargs="+", choices=["none", "nf4", "int4", "fp8"], default=["none"])
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--lora-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--mixed-tokens", type=int, nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "model")
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(CONFIG))
        rows, mixed = [], []
        for quantization in args.quantization:
            rows += run_batches(checkpoint, quantization, args, bandwidth) if args.batches else []
            mixed += run_mixed(checkpoint, quantization, args) if args.mixed_tokens else []
    results = [*(row.result(bandwidth, args) for row in rows), *(row.result(args) for row in mixed)]
    write_results(args.json, UNITS, results)


if __name__ == "__main__":
    main()
