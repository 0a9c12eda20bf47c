"""Builds an engine with random weights in the shape of a Llama, by options that several benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

from engine_driver import load
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from random_llama import write_alike_adapters

RANK = 16
HEAD_SIZE = 128


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model's shape, by default that of an 8B Llama."""
    for name, default in (("layers", 32), ("hidden", 4096), ("vocabulary", 128256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add_shape_arguments(parser)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument(
        "--engine-option",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="options of EngineConfig, such as max_num_mixed_tokens=2048, and lora.NAME=VALUE for those of LoRAConfig",
    )


def llama_config(args: argparse.Namespace, max_length: int) -> dict[str, Any]:
    heads = args.hidden // HEAD_SIZE or 1
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 7 // 2,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "max_position_embeddings": max_length,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16" if args.device == "cuda" else "float32",
    }


def make_engine(
    folder: Path,
    args: argparse.Namespace,
    max_num_seqs: int,
    max_length: int,
    num_adapters: int = 0,
    speculative_config: SpeculativeConfig | None = None,
    model: dict[str, Any] | None = None,
) -> tuple[Engine, list[LoRARequest]]:
    """Returns an engine as a server configures it, and its adapters, which are all in slots.

    The prefix cache is off, and --engine-option is applied last. `model` is the config.json of another model than the
    one that the arguments describe.
    """
    model = model or llama_config(args, max_length)
    (folder / "config.json").write_text(json.dumps(model))
    lora = None
    if num_adapters:
        lora = LoRAConfig(max_loras=num_adapters, max_lora_rank=RANK, max_cpu_loras=num_adapters)
    config = EngineConfig(
        str(folder),
        device=args.device,
        load_format="dummy",
        kv_cache_dtype=args.kv_cache_dtype,
        kv_cache_tokens=max_num_seqs * (max_length + EngineConfig.block_size) if args.device == "cpu" else None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, EngineConfig.max_num_batched_tokens),
        enable_prefix_caching=False,
        speculative_config=speculative_config,
        lora=lora,
    )
    gc.unfreeze()  # so that an earlier engine can be collected
    engine = build_engine(_with_options(config, args.engine_option))
    gc.collect()
    gc.freeze()  # as the server's worker does: a full collection would stop the steps for 0.1 s
    paths = write_alike_adapters(folder / "adapters", model, num_adapters, RANK) if num_adapters else []
    return engine, load(engine, paths)


def _with_options(config: EngineConfig, options: list[str]) -> EngineConfig:
    changes: dict[bool, dict[str, Any]] = {False: {}, True: {}}  # By whether they are of LoRAConfig.
    for option in options:
        name, _, text = option.partition("=")
        is_lora = name.startswith("lora.")
        target, field = (config.lora if is_lora else config), name.removeprefix("lora.")
        if target is None or field not in {each.name for each in dataclasses.fields(target)}:
            sys.exit(f"--engine-option {option}: there is no such option{'' if target else ' without adapters'}.")
        try:
            changes[is_lora][field] = json.loads(text)
        except json.JSONDecodeError:
            changes[is_lora][field] = text
    lora = config.lora and dataclasses.replace(config.lora, **changes[True])
    return dataclasses.replace(config, lora=lora, **changes[False])
