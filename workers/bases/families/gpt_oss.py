"""Describes gpt-oss, which has sinks in all layers, a window in every second one, and experts with biases and a clamped
activation."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.kernels.moe.expert_activation import ClampedSwiGLU
from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.rope_config import RopeConfig

POSITIONS = 131072
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias", True)
    attention = fields.attention(_rope(fields), kv_heads=8, head_dim=64)
    attention = replace(attention, qkv_bias=bias, o_bias=bias, has_sinks=True)
    kinds = fields.layer_types(lambda i: "full_attention" if i % 2 else WINDOWED)
    window = fields.integer("sliding_window", 128)
    layer = LayerConfig(attention, fields.mlp())
    layers = fields.windowed_layers(layer, [window if kind == WINDOWED else None for kind in kinds])
    return replace(fields.model(layers, POSITIONS, eps=1e-5), experts=_experts(fields))


def _experts(fields: ConfigFields) -> ExpertsConfig:
    return ExpertsConfig(
        count=fields.integer("num_local_experts", 128),
        per_token=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("intermediate_size", 2880),
        sums_to_one=True,
        layers=frozenset(range(fields.num_layers)),
        router_bias=True,
        router_name="router",
        activation=ClampedSwiGLU(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
        biases=True,
        transposed=True,
        interleaved=True,
    )


def _rope(fields: ConfigFields) -> RopeConfig:
    if not (fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling")):
        fields = ConfigFields(fields.raw | {"rope_scaling": _YARN}, {})
    return fields.rope(POSITIONS, theta=150000.0, head_dim=64)


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt-oss 20B, 120B",
    "sinks, alternating windows, experts with biases, in MXFP4 or plain",
    _gpt_oss,
    {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": POSITIONS,
    },
)
