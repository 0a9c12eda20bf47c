"""Describes GLM-4, and GLM-4.5 to 4.7 with mixtures whose routers have corrected sigmoid scores."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.kernels.moe.routing_rule import ExpertGroups
from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig, LayerNorms
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.mtp_config import deepseek_mtp

POSITIONS = 131072
FOUR_NORMS = LayerNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def _glm(fields: ConfigFields) -> ModelConfig:
    rope = fields.rope(POSITIONS, head_dim=128, partial=0.5, is_interleaved=True)
    attention = fields.attention(rope, kv_heads=2, head_dim=128)
    layer = LayerConfig(
        replace(attention, qkv_bias=fields.flag("attention_bias", True)), replace(fields.mlp(), is_fused=True)
    )
    return fields.model(fields.equal_layers(layer), POSITIONS, eps=1.5625e-07)


def _glm4(fields: ConfigFields) -> ModelConfig:
    model = _glm(fields)
    return replace(model, layers=tuple(replace(layer, norms=FOUR_NORMS) for layer in model.layers))


def _glm4_moe(fields: ConfigFields) -> ModelConfig:
    attention = replace(
        fields.attention(fields.rope(POSITIONS, partial=0.5), kv_heads=8),
        qkv_bias=fields.flag("attention_bias"),
        qk_norm="head" if fields.flag("use_qk_norm") else None,
    )
    layer, mtp_names = LayerConfig(attention, fields.mlp()), fields.mtp_layers(1)
    model = fields.model(fields.equal_layers(layer), POSITIONS, eps=1e-5)
    first_sparse = fields.raw.get("first_k_dense_replace", 1)
    layers = frozenset(range(first_sparse, fields.num_layers))
    return replace(
        model,
        experts=_experts(fields, layers) if layers else None,
        mtp_names=mtp_names,
        mtp=deepseek_mtp(layer, mtp_names[0]) if mtp_names else None,
    )


def _experts(fields: ConfigFields, layers: frozenset[int]) -> ExpertsConfig:
    inner, num_groups = fields.integer("moe_intermediate_size", 1408), fields.integer("n_group", 1)
    groups = ExpertGroups(num_groups, fields.integer("topk_group", 1), "top_two")
    return ExpertsConfig(
        count=fields.integer("n_routed_experts", 128),
        per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=inner,
        sums_to_one=fields.flag("norm_topk_prob", True),
        layers=layers,
        scores="sigmoid",
        groups=None if num_groups == 1 else groups,
        scaling=fields.number("routed_scaling_factor", 1.0),
        correction_name="gate.e_score_correction_bias",
        router_float32=True,
        activation=fields.expert_activation(),
        shared=SharedExpertConfig(inner * fields.integer("n_shared_experts", 1)),
    )


_DEFAULTS = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": [151329, 151336, 151338],
}

GLM = Family("GlmForCausalLM", "GLM-4 9B", "half-rotated heads, fused gate/up", _glm, _DEFAULTS)
GLM4 = Family(
    "Glm4ForCausalLM", "GLM-4-0414, GLM-Z1", "as GLM-4, with norms before and after attention and MLP", _glm4, _DEFAULTS
)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "GLM-4.5, 4.5-Air, 4.6, 4.7",
    "a mixture with shared experts behind dense layers",
    _glm4_moe,
    {
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "max_position_embeddings": POSITIONS,
    },
)
