"""Measures the whole engine on a mixture of experts in Qwen3-30B-A3B's shape, with fewer layers and random weights.

    python benchmarks/moe_engine.py [--layers 6] [--batches 1 8 64 256] [--json FILE]

It measures milliseconds per decode step and prefill tokens per second, timed as in engine_e2e.py: without adapters,
with 8 adapters of rank 16 on attention alone, and with 8 on attention and all experts. These take turns three times,
and the median counts; request i uses adapter i modulo their number. The floor is the time to read what a step needs, at
the copy bandwidth of the same run: attention, routers, head, KV cache, the experts that so many tokens choose if all
are equally likely, and the adapters' parts for these.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

from engine_driver import copy_bandwidth, decode_step_ms, load, prefill_tokens_per_s
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.startup import build_engine
from random_llama import write_alike_adapters

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
BYTES = 2  # The size of a bfloat16.


def floor_bytes(layers: int, batch: int, adapters: int, on_experts: bool) -> float:
    heads, kv = HEADS * HEAD, KV_HEADS * HEAD
    attention = HIDDEN * (heads + 2 * kv) + heads * HIDDEN
    chosen = _chosen(batch)
    numbers = attention + EXPERTS * HIDDEN + chosen * 3 * HIDDEN * INNER
    numbers += batch * (PROMPT + GENERATED / 2) * 2 * kv
    if adapters:
        numbers += min(batch, adapters) * RANK * (4 * HIDDEN + 2 * (heads + kv))
    if adapters and on_experts:
        own = min(batch, adapters) * _chosen(max(1, batch // adapters))
        numbers += own * RANK * (HIDDEN + 2 * INNER + INNER + HIDDEN)
    return BYTES * (layers * numbers + CONFIG["vocab_size"] * HIDDEN)


def _chosen(tokens: int) -> float:
    """Returns the expected number of distinct experts that these tokens choose."""
    return EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    bandwidth = copy_bandwidth()
    config = CONFIG | {"num_hidden_layers": arguments.layers}
    rows: list[dict[str, Any]] = []
    loras: dict[str, list[LoRARequest]]
    steps_ms: dict[tuple[str, int], list[float]]
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        made = {
            "attention": write_alike_adapters(Path(root) / "attention", config, ADAPTERS, RANK, experts=False),
            "experts": write_alike_adapters(Path(root) / "experts", config, ADAPTERS, RANK),
        }
        engine = build_engine(
            EngineConfig(
                model=str(model),
                device="cuda",
                load_format="dummy",
                max_num_seqs=max(arguments.batches),
                max_num_batched_tokens=8192,
                max_num_mixed_tokens=8192,
                max_gap_ms=10_000,
                max_model_len=1024,
                kv_cache_tokens=max(arguments.batches) * (PROMPT + GENERATED + 32),
                enable_prefix_caching=False,
                lora=LoRAConfig(
                    max_loras=ADAPTERS, max_lora_rank=RANK, max_cpu_loras=2 * ADAPTERS, extra_memory_gib=16
                ),
            )
        )
        loras = {"none": [], **{kind: load(engine, paths) for kind, paths in made.items()}}
        steps_ms = {(kind, batch): [] for kind in loras for batch in arguments.batches}
        for _ in range(ROUNDS):
            for kind, batch in steps_ms:
                steps_ms[kind, batch].append(decode_step_ms(engine, batch, PROMPT, GENERATED, loras[kind]))
        for (kind, batch), times in steps_ms.items():
            prefill = prefill_tokens_per_s(engine, batch, PROMPT, 2, loras[kind], 2)
            step_ms = statistics.median(times)
            floor = floor_bytes(arguments.layers, batch, len(loras[kind]), kind == "experts") / bandwidth * 1e3
            rows.append({"adapters": kind, "batch": batch, "step_ms": step_ms, "floor_ms": floor, "prefill": prefill})
            print(
                f"{kind:9} batch {batch:3}: {step_ms:6.2f} ms per step ({min(times):.2f} to {max(times):.2f}), "
                f"floor {floor:5.2f}; prefill {prefill:8.0f} tokens/s",
                flush=True,
            )
        engine.close()
    if arguments.json:
        arguments.json.write_text(json.dumps({"bandwidth": bandwidth, "layers": arguments.layers, "rows": rows}))


if __name__ == "__main__":
    main()
