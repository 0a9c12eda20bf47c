"""Measures the first token of a conversation that returns after its KV blocks have left the GPU.

    python benchmarks/kv_tiers.py [--context 16384] [--repeats 3] [--disk-dir FOLDER] [--json FILE]

The model has the shape of Llama 3.1 8B with random weights. On a CPU use --device cpu --layers 4 --hidden 256
--vocabulary 512 --context 1024. For each tier there are three measurements, each of a sequence alone: the first turn,
the second turn after other conversations have overwritten the GPU's blocks, and the same second turn with another cache
salt, which finds nothing in any tier. The GPU holds two conversations. For the disk, host memory holds four, and enough
others follow that the first one is on disk alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmark_results import Case, Value, write_results
from engine_driver import answer_alone
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.messages import TokenOutput
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine

ANSWER, QUESTION, BLOCK = 16, 60, 16
ON_GPU, ON_HOST = 2, 4  # conversations that fit
UNITS = {
    "first_turn_ms": "ms to the first token",
    "returned_ms": "ms to the first token",
    "read_again_ms": "ms to the first token",
    "share": "of the time of reading it again",
    "cached_tokens": "tokens of the second turn that were not computed again",
    "from_host_tokens": "of these from host memory",
    "from_disk_tokens": "of these from disk",
}


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    heads = args.hidden // 128
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": 7 * args.hidden // 2,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16" if args.device == "cuda" else "float32",
    }


def block_bytes(args: argparse.Namespace) -> int:
    kv_heads = max(1, args.hidden // 128 // 4)
    return 2 * args.layers * kv_heads * 128 * BLOCK * (2 if args.device == "cuda" else 4)


def answer(engine: Engine, name: str, prompt: list[int], salt: str = "") -> tuple[float, list[TokenOutput]]:
    """Returns the seconds to the first token, and all outputs. Waits for the disk at the end."""
    first_s, outputs = answer_alone(engine, name, prompt, ANSWER, salt)
    tiers = engine.scheduler.memory.tiers
    assert tiers is not None
    tiers.poll()
    while tiers.disk.num_jobs:
        time.sleep(0.001)
        tiers.poll()
    return first_s, outputs


def measure(engine: Engine, context: int, repeats: int, num_others: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"first_turn_ms": [], "returned_ms": [], "read_again_ms": []}
    cached: list[int] = []
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        drawn: list[int] = torch.randint(10, engine.hello.vocab_size, (count,), generator=generator).tolist()
        return drawn

    for turn in range(1 + repeats):
        prompt = draw(context)
        first_s, outputs = answer(engine, f"first {turn}", prompt)
        for other in range(num_others):
            answer(engine, f"other {turn} {other}", draw(context))
        talk = prompt + [token for output in outputs for token in output.token_ids] + draw(QUESTION)
        returned_s, outputs = answer(engine, f"returned {turn}", talk)
        again_s, _ = answer(engine, f"again {turn}", talk, salt=str(turn))
        if turn:  # the first one warms up
            for name, seconds in zip(times, (first_s, returned_s, again_s), strict=True):
                times[name].append(seconds * 1e3)
            cached.append(outputs[0].num_cached_tokens)
    figures = {name: statistics.median(values) for name, values in times.items()}
    hits = engine.stats().kv_tiers.hit_tokens_total
    return figures | {
        "share": figures["returned_ms"] / figures["read_again_ms"],
        "cached_tokens": min(cached),
        "from_host_tokens": hits.get("host", 0) / (1 + repeats),
        "from_disk_tokens": hits.get("disk", 0) / (1 + repeats),
    }


def run(args: argparse.Namespace, tier: str, folder: str) -> dict[str, float]:
    length = args.context + ANSWER + QUESTION + ANSWER + BLOCK
    talk_gib = -(-length // BLOCK) * block_bytes(args) / 2**30
    others = ON_GPU + 1 if tier == "host" else ON_GPU + ON_HOST + 1
    on_disk = tier == "disk"
    config = EngineConfig(
        folder,
        device=args.device,
        load_format="dummy",
        max_num_seqs=8,
        max_model_len=length,
        kv_cache_tokens=ON_GPU * length,
        kv_host_gib=(ON_HOST if on_disk else others + 2) * talk_gib,
        kv_disk_dir=str(args.disk_dir or folder) if on_disk else None,
        kv_disk_gib=(others + 3) * talk_gib if on_disk else 0.0,
    )
    engine = build_engine(config)
    figures = measure(engine, args.context, args.repeats, others)
    logging.info("%s: %s", tier, engine.stats().kv_tiers)
    engine.close()
    del engine
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16384, help="tokens of the first prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiers", nargs="+", choices=("host", "disk"), default=["host", "disk"])
    parser.add_argument("--disk-dir", type=Path, help="default: the folder for temporary files")
    for name, default in (("layers", 32), ("hidden", 4096), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    cases: list[Case] = []
    for tier in args.tiers:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(model_config(args)))
            figures = run(args, tier, folder)
        settings: dict[str, Value] = {
            "tier": tier,
            "context": args.context,
            "layers": args.layers,
            "hidden": args.hidden,
        }
        cases.append(Case(settings, figures))
        for name, value in figures.items():
            print(f"{tier:5} {name:18} {value:10.3f} {UNITS[name]}", flush=True)
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
