"""Measures decode steps of model families with random weights in their real shapes.

    python benchmarks/families_decode.py [--only gpt-oss-20b ...] [--batches 1 8 64] [--attention-backend auto]
        [--seconds 150] [--json FILE]

Each family gets an engine as a server has it, with all layers or as many of them as fit into memory and time (FAMILIES
below; the output states them). Contexts begin with 512 random tokens, and the figure is the median host time of the
steps in which every sequence decodes. The last column has 8 adapters of rank 16 on attention, delta nets and dense
MLPs, at the largest batch, relative to the base. The floor is the time to read at --bandwidth what a step needs: all
weights but tables that are only looked up, the experts that so many tokens choose if all are equally likely, and the
keys and values that the layers see. A family that would end after --seconds is left out. FlashInfer compiles for
minutes at its first use on a machine, which --attention-backend triton avoids. gemma-4-12b has the sizes of Gemma 3's
12B model with Gemma 4's kinds of layers, and gpt-oss has its experts in bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import torch
from safetensors.torch import save_file

from benchmark_results import Case, write_results
from engine_driver import copy_bandwidth, decode_step_ms, load
from lorafleet.protocol.engine_config import AttentionName, Device, EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers import startup, step_startup
from lorafleet.workers.attention_spec import layer_attention
from lorafleet.workers.engine import Engine
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.step.step_runner import StepRunner

DEVICE: Device = "cuda"
PROMPT, GENERATED, ROUNDS = 512, 24, 3
RANK, ADAPTERS = 16, 8
PROMPT_TOKENS = 8192  # The most tokens of a step.
ALLOWED, ALLOWED_MS = 1.35, 0.9  # The aim at batch 1 and 8: this factor of the floor and so many milliseconds.
ADAPTED = re.compile(r"\.(self|linear)_attn\.|layers\.\d+\.mlp\.(gate|up|down)_proj$")

COMMON: dict[str, Any] = {"max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DELTA_NET: dict[str, Any] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# Each: the layers of the published model, those that are measured, and config.json.
FAMILIES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gpt-oss-20b": (
        24,
        24,
        {
            "architectures": ["GptOssForCausalLM"],
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
    "gemma-4-12b": (
        48,
        48,
        {
            "architectures": ["Gemma4ForCausalLM"],
            "vocab_size": 262144,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "mistral-small-24b": (
        40,
        40,
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
            "rope_theta": 1e9,
        },
    ),
    "glm-4.5-air": (
        46,
        12,
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
            "rope_theta": 1e6,
        },
    ),
    "deepseek-v3": (
        61,
        4,
        LATENT
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm-4.7-flash": (
        47,
        24,
        LATENT
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
        },
    ),
    "qwen3-next-80b": (
        48,
        12,
        DELTA_NET
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_key_value_heads": 2,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
    ),
    "qwen3.5-9b": (
        32,
        32,
        DELTA_NET
        | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3.5-35b-a3b": (
        40,
        40,
        DELTA_NET
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}
DEFAULT = ["gpt-oss-20b", "gemma-4-12b", "mistral-small-24b", "glm-4.5-air", "deepseek-v3"]
UNITS = {
    "step_ms": "ms, median",
    "floor_ms": "ms",
    "allowed_ms": "ms",
    "adapted_ms": "ms, median",
}


@dataclass(frozen=True, slots=True)
class Measured:
    family: str
    layers: int
    batch: int
    graph_ms: float
    floor_ms: float
    adapted_ms: float | None  # With the adapters; None at batches where they are not measured.

    @property
    def allowed_ms(self) -> float:
        return ALLOWED * self.floor_ms + ALLOWED_MS

    def case(self) -> Case:
        settings = {"family": self.family, "layers": self.layers, "batch": self.batch}
        figures = {"step_ms": self.graph_ms, "floor_ms": self.floor_ms}
        return Case(settings, figures | {"allowed_ms": self.allowed_ms, "adapted_ms": self.adapted_ms})

    def line(self) -> str:
        of_layers = f"{self.layers} of {FAMILIES[self.family][0]} layers"
        text = (
            f"{self.family:18} {of_layers:18} batch {self.batch:3}: "
            f"{self.graph_ms:6.2f} ms, "
            f"floor {self.floor_ms:5.2f}, {self.graph_ms / self.floor_ms:.2f} x, "
            f"{'within' if self.graph_ms <= self.allowed_ms else 'MISSES'} {self.allowed_ms:.2f}"
        )
        if self.adapted_ms is not None:
            text += f"; {ADAPTERS} adapters {self.adapted_ms:.2f} ({self.adapted_ms / self.graph_ms:.2f} x)"
        return text


def floor_bytes(model: EngineModel, batch: int, context: float) -> float:
    """Returns the bytes that a decode step reads once: weights, chosen experts, keys and values."""
    weights = float(sum(parameter.nbytes for parameter in model.parameters()))
    for name, parameter in model.named_parameters():
        is_head = model.config.tie_word_embeddings and name.startswith("embed_tokens.")
        if name.startswith(("embed_tokens.", "per_layer.table")) and not is_head:
            weights -= parameter.nbytes
    for _, mixture in model.mixtures():
        experts = mixture.experts
        left_out = (1 - experts.per_token / experts.count) ** batch
        weights -= left_out * (mixture.gate_up_EUD.nbytes + mixture.down_EDI.nbytes)
    keys = 0.0
    for index in range(len(model.config.attentions)):
        layer = layer_attention(model.shard.local, index)
        keys += min(context, layer.window or context, layer.chunk or context) * layer.cached_numbers
    states = sum(shape.num_bytes(2) for shape in model.shard.local.states)
    return weights + batch * (keys * 2 + 2 * states)  # States are read and written.


def write_adapters(folder: Path, model: EngineModel) -> list[Path]:
    """Writes adapters that share one file of random weights, for all linears whose names ADAPTED matches."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).mul_(0.01).bfloat16().cpu()

    tensors = {}
    for names, linear in model.packed_linears():
        for name, outputs in zip(names, linear.out_features, strict=True):
            if ADAPTED.search(name):
                tensors[f"base_model.model.model.{name}.lora_A.weight"] = random(RANK, linear.in_features)
                tensors[f"base_model.model.model.{name}.lora_B.weight"] = random(outputs, RANK)
    modules = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors})
    paths = [folder / f"a{i}" for i in range(ADAPTERS)]
    for i, path in enumerate(paths):
        path.mkdir(parents=True)
        fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK + i, "target_modules": modules}
        (path / "adapter_config.json").write_text(json.dumps(fields))
        if i == 0:
            save_file(tensors, path / "adapter_model.safetensors")
        else:
            (path / "adapter_model.safetensors").hardlink_to(paths[0] / "adapter_model.safetensors")
    return paths


def generated_tokens(batch: int) -> int:
    """Returns the length of the answers: the first of them must last until the last prompt has been computed."""
    return GENERATED + 2 * batch * PROMPT // PROMPT_TOKENS


def make_engine(folder: Path, config: dict[str, Any], batches: list[int], backend: AttentionName) -> Engine:
    """Returns an engine whose graphs are for these batches only, which saves most of the time of a start."""
    (folder / "config.json").write_text(json.dumps(COMMON | config))
    with (
        mock.patch.object(step_startup, "graph_sizes", return_value=batches),
        mock.patch.object(step_startup, "graph_token_counts", return_value=[PROMPT]),
        mock.patch.object(startup, "graph_token_counts", return_value=[PROMPT]),
        mock.patch.object(StepRunner, "warm_up"),
    ):
        return startup.build_engine(
            EngineConfig(
                model=str(folder),
                device=DEVICE,
                load_format="dummy",
                max_num_seqs=max(batches),
                max_num_batched_tokens=PROMPT_TOKENS,
                max_num_mixed_tokens=PROMPT_TOKENS,
                max_gap_ms=10_000,
                max_model_len=2048,
                kv_cache_tokens=max(2048, max(batches) * (PROMPT + generated_tokens(max(batches)) + 32)),
                enable_prefix_caching=False,
                attention_backend=backend,
                lora=LoRAConfig(max_loras=ADAPTERS, max_lora_rank=RANK, max_cpu_loras=ADAPTERS),
            )
        )


def step_ms(engine: Engine, batch: int, loras: list[LoRARequest]) -> float:
    return statistics.median(
        decode_step_ms(engine, batch, PROMPT, generated_tokens(batch), loras) for _ in range(ROUNDS)
    )


def measure(family: str, batches: list[int], backend: AttentionName, bandwidth: float) -> list[Measured]:
    _, layers, config = FAMILIES[family]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = make_engine(folder, config | {"num_hidden_layers": layers}, batches, backend)
        model = engine.runner.steps.model
        loras = load(engine, write_adapters(folder / "adapters", model))
        graph_ms = {batch: step_ms(engine, batch, []) for batch in batches}
        adapted_ms = {max(batches): step_ms(engine, max(batches), loras)}
        rows = []
        for batch in batches:
            floor_ms = floor_bytes(model, batch, PROMPT + generated_tokens(batch) / 2) / bandwidth / 1e9
            adapted = adapted_ms.get(batch)
            rows.append(Measured(family, layers, batch, graph_ms[batch], floor_ms, adapted))
            print(rows[-1].line(), flush=True)
        engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=DEFAULT)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--attention-backend", choices=get_args(AttentionName), default="auto")
    parser.add_argument("--seconds", type=float, default=150.0, help="no family begins later than this")
    parser.add_argument("--bandwidth", type=float, help="TB/s; default: that of a copy in the same run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    bandwidth = args.bandwidth or copy_bandwidth() / 1e12
    print(f"floors are for {bandwidth:.2f} TB/s", flush=True)
    began_s, longest_s, rows = time.monotonic(), 0.0, []
    for family in args.only:
        started_s = time.monotonic()
        if started_s - began_s + longest_s > args.seconds:
            print(f"{family}: left out, since {args.seconds:.0f} s would pass before its end", flush=True)
            continue
        rows += measure(family, sorted(args.batches), args.attention_backend, bandwidth)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        longest_s = max(longest_s, time.monotonic() - started_s)
        print(f"{family}: {time.monotonic() - started_s:.0f} s", flush=True)
    write_results(args.json, UNITS, [row.case() for row in rows])


if __name__ == "__main__":
    main()
