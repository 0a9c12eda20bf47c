"""Measures the whole engine on a mixture of experts in Qwen3-30B-A3B's shape, with random weights.

    python benchmarks/moe_engine.py [--layers 6] [--batches 1 8 64 256] [--quantization none fp8 nf4 int4]
        [--kinds none attention experts] [--attention-backend triton] [--kernels] [--json FILE]

It measures milliseconds per decode step and prefill tokens per second, timed as in engine_e2e.py: without adapters,
with 8 adapters of rank 16 on attention alone, and with 8 on attention and all experts. These take turns three times,
and the median counts; request i uses adapter i modulo their number. The floor is the time to read what a step needs, at
the copy bandwidth of the same run: attention, routers, head, KV cache, the experts that so many tokens choose if all
are equally likely, and the adapters' parts for these. --quantization quantizes attention and experts at the start.
--kinds leaves out the other kinds of adapters. --kernels also prints how long each kernel takes in a step.

The real model has 48 layers. With fewer, the head is a larger part of a step, so only ratios of the same --layers can
be compared. All layers have copies of the first one's weights, since filling each would take seconds. A step reads
every copy from memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from engine_driver import (
    abort,
    copy_bandwidth,
    decode_step_ms,
    good_outputs,
    load,
    prefill_tokens_per_s,
    submit,
    until_all_answer,
)
from lorafleet.kernels.quant.tiled_weight import TiledWeight
from lorafleet.protocol.engine_config import AttentionName, EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers import model_loading
from lorafleet.workers.bases import weights
from lorafleet.workers.engine import Engine
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.startup import build_engine
from random_llama import write_alike_adapters

LATER_LAYER = re.compile(r"model\.layers\.[1-9]")
PROFILED_STEPS = 8
LEAST_US = 10  # of a kernel that is printed
PROMPT, GENERATED, RANK, ADAPTERS, ROUNDS = 512, 128, 16, 8, 3
EXPERTS, PER_TOKEN, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 128, 8, 2048, 768, 32, 4, 128
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": HIDDEN,
    "intermediate_size": 6144,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
KINDS = "none", "attention", "experts"  # what the adapters are on
BYTES = 2  # The size of a bfloat16.
# The size of a quantized number, including its share of the scales.
QUANTIZED_BYTES = {"none": BYTES, "fp8": 1.0, "nf4": 0.5 + 4 / 64, "int4": 0.5 + 2 / 128}


def floor_bytes(layers: int, batch: int, adapters: int, on_experts: bool, quantization: str = "none") -> float:
    heads, kv = HEADS * HEAD, KV_HEADS * HEAD
    attention = HIDDEN * (heads + 2 * kv) + heads * HIDDEN
    chosen = _chosen(batch)
    quantized = attention + chosen * 3 * HIDDEN * INNER
    numbers = EXPERTS * HIDDEN + batch * (PROMPT + GENERATED / 2) * 2 * kv
    if adapters:
        numbers += min(batch, adapters) * RANK * (4 * HIDDEN + 2 * (heads + kv))
    if adapters and on_experts:
        own = min(batch, adapters) * _chosen(max(1, batch // adapters))
        numbers += own * RANK * (HIDDEN + 2 * INNER + INNER + HIDDEN)
    of_layer = BYTES * numbers + QUANTIZED_BYTES[quantization] * quantized
    return layers * of_layer + BYTES * CONFIG["vocab_size"] * HIDDEN


def _chosen(tokens: int) -> float:
    """Returns the expected number of distinct experts that these tokens choose."""
    return EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** tokens)


def _options(model: Path, quantization: str, most: int, backend: AttentionName) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        attention_backend=backend,
        device="cuda",
        load_format="dummy",
        quantization=None if quantization == "none" else quantization,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        max_num_mixed_tokens=8192,
        max_gap_ms=10_000,
        max_model_len=1024,
        kv_cache_tokens=most * (PROMPT + GENERATED + 32),
        enable_prefix_caching=False,
        lora=LoRAConfig(max_loras=ADAPTERS, max_lora_rank=RANK, max_cpu_loras=2 * ADAPTERS, extra_memory_gib=16),
    )


def fill_alike(model: DecoderModel) -> None:
    """Fills the first layer and what is outside of layers with random weights, and copies the layer to the others."""
    parts = weights._parts
    weights._parts = lambda model: {name: part for name, part in parts(model).items() if not LATER_LAYER.match(name)}
    try:
        weights.fill_randomly(model)
    finally:
        weights._parts = parts
    first, *later = model.layers
    for layer in later:
        for own, of_first in zip(layer.parameters(), first.parameters(), strict=True):
            own.data.copy_(of_first.data)
        for module, first_module in zip(layer.modules(), first.modules(), strict=True):
            if isinstance(module, TiledWeight) and isinstance(first_module, TiledWeight):
                module.quantized_from = first_module.quantized_from


def print_kernels(engine: Engine, batch: int, loras: list[LoRARequest]) -> None:
    """Prints the microseconds of each kernel in a step in which every sequence decodes."""
    name = f"profile {batch}"
    submit(engine, name, batch, PROMPT, GENERATED, loras)
    until_all_answer(engine, name, batch)
    for _ in range(PROFILED_STEPS):
        good_outputs(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_STEPS):
            good_outputs(engine)
        torch.cuda.synchronize()
    abort(engine, name, batch)
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    for event in (event for event in events if event.device_time_total >= LEAST_US * PROFILED_STEPS):
        count = event.count / PROFILED_STEPS
        print(f"    {event.device_time_total / PROFILED_STEPS:8.1f} us, {count:5.1f} x {event.key[:70]}", flush=True)


def _measure(
    engine: Engine, loras: dict[str, list[LoRARequest]], batches: list[int]
) -> Iterator[tuple[str, int, list[float], float]]:
    """Yields the adapters' kind, the batch, the milliseconds of a step in each round, and prompt tokens per second."""
    steps_ms: dict[tuple[str, int], list[float]] = {(kind, batch): [] for kind in loras for batch in batches}
    for _ in range(ROUNDS):
        for kind, batch in steps_ms:
            steps_ms[kind, batch].append(decode_step_ms(engine, batch, PROMPT, GENERATED, loras[kind]))
    for (kind, batch), times in steps_ms.items():
        yield kind, batch, times, prefill_tokens_per_s(engine, batch, PROMPT, 2, loras[kind], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--quantization", nargs="+", choices=list(QUANTIZED_BYTES), default=["none"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--attention-backend", choices=get_args(AttentionName), default="auto")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    model_loading.fill_randomly = fill_alike
    bandwidth = copy_bandwidth()
    config = CONFIG | {"num_hidden_layers": arguments.layers}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        made = {
            kind: write_alike_adapters(Path(root) / kind, config, ADAPTERS, RANK, experts=kind == "experts")
            for kind in arguments.kinds
            if kind != "none"
        }
        for quantization in arguments.quantization:
            most = max(arguments.batches)
            engine = build_engine(_options(model, quantization, most, arguments.attention_backend))
            loras = {kind: load(engine, made[kind]) if kind in made else [] for kind in arguments.kinds}
            for kind, batch, times, prefill in _measure(engine, loras, arguments.batches):
                step_ms, adapters = statistics.median(times), len(loras[kind])
                floor = (
                    floor_bytes(arguments.layers, batch, adapters, kind == "experts", quantization) / bandwidth * 1e3
                )
                row = {"quantization": quantization, "adapters": kind, "batch": batch, "step_ms": step_ms}
                rows.append(row | {"floor_ms": floor, "prefill": prefill})
                print(
                    f"{quantization:4} {kind:9} batch {batch:3}: {step_ms:6.2f} ms per step ({min(times):.2f} to "
                    f"{max(times):.2f}), floor {floor:5.2f}, {step_ms / floor:.2f} x; prefill {prefill:8.0f} tokens/s",
                    flush=True,
                )
                if arguments.kernels:
                    print_kernels(engine, batch, loras[kind])
            engine.close()
    if arguments.json:
        arguments.json.write_text(json.dumps({"bandwidth": bandwidth, "layers": arguments.layers, "rows": rows}))


if __name__ == "__main__":
    main()
