"""Measures what snapshots of recurrent states save in the second turn of a conversation, and what they cost.

    python benchmarks/state_turns.py [--context 4096] [--layers 32] [--repeats 3] [--json FILE]

The model has the shape of Qwen3.5-9B with random weights; on a CPU use --device cpu --layers 4 --hidden 256
--vocabulary 512 --context 1024. There are three measurements of the time to the first token, each for new conversations
of a sequence alone: the first turn, the second turn (the first prompt, its answer and a question), and the same second
turn with another cache salt, which finds nothing in the cache. The copies of states are timed by themselves: a decoding
sequence takes one for every 64 tokens.
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
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine

ANSWER, QUESTION, SEQUENCES = 100, 60, 8
COPIES = 20  # Times that a copy is measured.
UNITS = {
    "first_turn_ms": "ms to the first token",
    "second_turn_ms": "ms to the first token",
    "second_turn_uncached_ms": "ms to the first token",
    "cached_tokens": "tokens of the second turn that were not computed again",
    "copy_one_us": "us for the state of one sequence",
    "copy_all_us": f"us for the states of {SEQUENCES} sequences",
    "state_mib": "MiB of a sequence's state",
}


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    heads = max(2, args.hidden // 256)
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(args.layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": min(256, args.hidden // 2),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16" if args.device == "cuda" else "float32",
    }


def copy_us(engine: Engine, count: int) -> float:
    """Returns the median time of copying the states of so many sequences to snapshots."""
    states = engine.runner.steps.states
    assert states is not None
    pairs = [(slot, states.snapshot_slots[slot]) for slot in range(count)]
    times: list[float] = []
    for _ in range(COPIES):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        states.copy(pairs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def measure(engine: Engine, context: int, repeats: int) -> dict[str, float]:
    figures: dict[str, list[float]] = {"first_turn_ms": [], "second_turn_ms": [], "second_turn_uncached_ms": []}
    cached: list[int] = []
    generator = torch.Generator().manual_seed(0)
    for turn in range(1 + repeats):
        drawn = torch.randint(10, engine.hello.vocab_size, (context + QUESTION,), generator=generator).tolist()
        first_s, outputs = answer_alone(engine, f"first {turn}", drawn[:context], ANSWER)
        said = [token for output in outputs for token in output.token_ids]
        prompt = drawn[:context] + said + drawn[context:]
        second_s, outputs = answer_alone(engine, f"second {turn}", prompt, ANSWER)
        uncached_s, _ = answer_alone(engine, f"uncached {turn}", prompt, ANSWER, salt=str(turn))
        if turn:  # the first one warms up
            for name, seconds in zip(figures, (first_s, second_s, uncached_s), strict=True):
                figures[name].append(seconds * 1e3)
            cached.append(outputs[0].num_cached_tokens)
    return {name: statistics.median(values) for name, values in figures.items()} | {"cached_tokens": min(cached)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the first prompt")
    parser.add_argument("--repeats", type=int, default=3)
    for name, default in (("layers", 32), ("hidden", 4096), ("vocabulary", 248320)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    length = args.context + ANSWER + QUESTION + ANSWER
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(args)))
        config = EngineConfig(
            folder,
            device=args.device,
            load_format="dummy",
            max_num_seqs=SEQUENCES,
            max_model_len=length,
            kv_cache_tokens=SEQUENCES * length,
        )
        engine = build_engine(config)
        figures = measure(engine, args.context, args.repeats)
        figures |= {"copy_one_us": copy_us(engine, 1), "copy_all_us": copy_us(engine, SEQUENCES)}
        states = engine.runner.steps.states
        assert states is not None
        figures["state_mib"] = states.snapshot_bytes / len(states.snapshot_slots) / 2**20
        engine.close()
    settings: dict[str, Value] = {"context": args.context, "layers": args.layers, "hidden": args.hidden}
    for name, value in figures.items():
        print(f"{name:24} {value:10.1f} {UNITS[name]}")
    share = figures["second_turn_ms"] / figures["first_turn_ms"]
    print(f"the second turn's first token takes {share:.3f} of the first turn's")
    write_results(args.json, UNITS, [Case(settings, figures)])


if __name__ == "__main__":
    main()
