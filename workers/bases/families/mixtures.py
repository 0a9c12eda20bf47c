"""Describes Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE, which have experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.qwen import POSITIONS, window
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import ModuleNames

MIXTRAL_NAMES = ModuleNames(
    older=(
        ("mlp.experts.*.gate_proj", "block_sparse_moe.experts.*.w1"),
        ("mlp.experts.*.up_proj", "block_sparse_moe.experts.*.w3"),
        ("mlp.experts.*.down_proj", "block_sparse_moe.experts.*.w2"),
        ("mlp", "block_sparse_moe"),
    )
)


def _mixtral(fields: ConfigFields) -> ModelConfig:
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 8),
        per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size", 14336),
        sums_to_one=True,
        layers=frozenset(range(fields.num_layers)),
        activation=fields.expert_activation(),
    )
    positions = 4096 * 32
    attention = fields.attention(fields.rope(positions, theta=1e6), kv_heads=8)
    layer = LayerConfig(replace(attention, window=fields.raw.get("sliding_window")), fields.mlp())
    model = fields.model(fields.equal_layers(layer), positions, eps=1e-5)
    return replace(model, experts=experts, names=MIXTRAL_NAMES)


def _qwen3_moe(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    layers = _sparse_layers(fields)
    count = "num_experts" if "num_experts" in fields.raw else "num_local_experts"  # in transformers 4 and in 5
    experts = ExpertsConfig(
        count=fields.integer(count, 128),
        per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        sums_to_one=fields.flag("norm_topk_prob"),
        layers=layers,
        activation=fields.expert_activation(),
    )
    attention = fields.attention(fields.rope(POSITIONS), kv_heads=4)
    attention = replace(attention, qkv_bias=bias, o_bias=bias, qk_norm="head", window=window(fields))
    model = fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp())), POSITIONS)
    return replace(model, experts=experts if layers else None)


def _qwen2_moe(fields: ConfigFields) -> ModelConfig:
    layers = _sparse_layers(fields)
    experts = ExpertsConfig(
        count=fields.integer("num_experts", 60),
        per_token=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("moe_intermediate_size", 1408),
        sums_to_one=fields.flag("norm_topk_prob"),
        layers=layers,
        activation=fields.expert_activation(),
        shared=SharedExpertConfig(
            fields.integer("shared_expert_intermediate_size", 5632), "shared_expert", gate_name="shared_expert_gate"
        ),
    )
    attention = fields.attention(fields.rope(POSITIONS), kv_heads=16)
    layer = LayerConfig(replace(attention, qkv_bias=fields.flag("qkv_bias", True)), fields.mlp())
    size, first_full = window(fields), fields.raw.get("max_window_layers", 28)
    kinds = fields.layer_types(lambda i: "full_attention" if i % 2 or i >= first_full else WINDOWED)
    windows = [size if kind == WINDOWED else None for kind in kinds]
    model = fields.model(fields.windowed_layers(layer, windows), POSITIONS)
    return replace(model, experts=experts if layers else None)


def _olmoe(fields: ConfigFields) -> ModelConfig:
    if fields.raw.get("clip_qkv") is not None:
        raise UnsupportedModel(f"clip_qkv={fields.raw['clip_qkv']!r} is not supported; only null is.")
    bias, positions = fields.flag("attention_bias"), 4096
    experts = ExpertsConfig(
        count=fields.integer("num_experts", 64),
        per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("intermediate_size", 2048),
        sums_to_one=fields.flag("norm_topk_prob"),
        layers=frozenset(range(fields.num_layers)),
        activation=fields.expert_activation(),
    )
    attention = replace(fields.attention(fields.rope(positions)), qkv_bias=bias, o_bias=bias, qk_norm="row")
    model = fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp())), positions, eps=1e-5)
    return replace(model, experts=experts)


def _sparse_layers(fields: ConfigFields) -> frozenset[int]:
    every, dense = fields.integer("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
    return frozenset(i for i in range(fields.num_layers) if i not in dense and (i + 1) % every == 0)


MIXTRAL = Family("MixtralForCausalLM", "Mixtral", "a mixture of experts in every layer", _mixtral)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "Qwen3-MoE",
    "a mixture of experts, except in layers that `mlp_only_layers` or `decoder_sparse_step` exclude",
    _qwen3_moe,
)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "Qwen1.5-MoE, Qwen2-57B-A14B",
    "a mixture with a weighted shared expert; windows; biases of q, k and v",
    _qwen2_moe,
    {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
)
OLMOE = Family(
    "OlmoeForCausalLM",
    "OLMoE",
    "a mixture in every layer, norms of all heads together",
    _olmoe,
    {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "eos_token_id": 50279,
    },
)
