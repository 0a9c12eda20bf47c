"""Describes DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash: latent attention, and mixtures of many small experts behind
the first layers.

config.json counts layers that predict further tokens (MTP) separately. Checkpoints have them behind the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from lorafleet.kernels.moe.routing_rule import ExpertGroups
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LatentAttentionConfig, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.mtp_config import deepseek_mtp
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.rope_parameters import read_rope


def _deepseek_v2(fields: ConfigFields) -> ModelConfig:
    fields.refuse("scoring_func", "softmax")
    fields.refuse("norm_topk_prob", False)
    fields.refuse("topk_method", "greedy", "group_limited_greedy")
    is_grouped = fields.raw.get("topk_method") == "group_limited_greedy"
    experts = replace(_experts(fields, _behind_dense(fields, 0)), groups=_groups(fields, "max") if is_grouped else None)
    return _model(fields, experts, positions=2048)


def _deepseek_v3(fields: ConfigFields) -> ModelConfig:
    return _model(fields, _sigmoid_experts(fields, _behind_dense(fields, 3)), positions=4096)


def _glm4_moe_lite(fields: ConfigFields) -> ModelConfig:
    layers = _behind_dense(fields, 1)
    kinds = fields.raw.get("mlp_layer_types")
    if kinds is not None:
        if set(kinds) - {"dense", "sparse"} or len(kinds) != fields.num_layers:
            raise UnsupportedModel(f"mlp_layer_types {sorted(set(kinds))} over {len(kinds)} layers is not supported.")
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == "sparse")
    return _model(fields, _sigmoid_experts(fields, layers), positions=202752, eps=1e-5)


def _model(fields: ConfigFields, experts: ExpertsConfig, positions: int, eps: float = 1e-6) -> ModelConfig:
    fields.refuse("mlp_bias", False)
    layer, mtp_names = LayerConfig(_attention(fields, positions), fields.mlp()), fields.mtp_layers(0)
    return replace(
        fields.model(fields.equal_layers(layer), positions, eps=eps),
        experts=experts if experts.layers else None,
        mtp_names=mtp_names,
        mtp=deepseek_mtp(layer, mtp_names[0]) if mtp_names else None,
    )


def _attention(fields: ConfigFields, positions: int) -> LatentAttentionConfig:
    fields.refuse("num_key_value_heads", fields.num_heads)
    bias, nope_dim = fields.flag("attention_bias"), fields.integer("qk_nope_head_dim", 128)
    rope_dim = fields.integer("qk_rope_head_dim", 64)
    rope = read_rope(fields.raw, rope_dim, fields.max_positions(positions), 10000.0)
    return LatentAttentionConfig(
        num_heads=fields.num_heads,
        latent_dim=fields.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5 * _scale_of_yarn(rope),
        rope=replace(rope, is_interleaved=fields.flag("rope_interleave", True)),
        q_rank=None if fields.raw.get("q_lora_rank") is None else fields.integer("q_lora_rank", 1536),
        a_bias=bias,
        o_bias=bias,
    )


def _scale_of_yarn(rope: RopeConfig) -> float:
    """Returns the factor of the scores. The factor of cos and sin does not include it (workers/models/rope.py)."""
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return float((0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2)


def _experts(fields: ConfigFields, layers: frozenset[int]) -> ExpertsConfig:
    if fields.activation() != "silu":
        raise UnsupportedModel(f"hidden_act={fields.raw['hidden_act']!r} is not supported for experts; only silu is.")
    inner = fields.integer("moe_intermediate_size", 2048)
    num_shared = fields.raw.get("n_shared_experts")
    shared = SharedExpertConfig(inner * fields.integer("n_shared_experts", 1)) if num_shared else None
    return ExpertsConfig(
        count=fields.integer("n_routed_experts", 256),
        per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=inner,
        sums_to_one=False,
        layers=layers,
        scaling=fields.number("routed_scaling_factor", 1.0),
        router_float32=True,
        shared=shared,
    )


def _sigmoid_experts(fields: ConfigFields, layers: frozenset[int]) -> ExpertsConfig:
    """Returns the experts of DeepSeek V3, whose choice a vector corrects."""
    fields.refuse("scoring_func", "sigmoid")
    fields.refuse("topk_method", "noaux_tc")
    return replace(
        _experts(fields, layers),
        sums_to_one=fields.flag("norm_topk_prob", True),
        scores="sigmoid",
        groups=_groups(fields, "top_two"),
        correction_name="gate.e_score_correction_bias",
    )


def _groups(fields: ConfigFields, ranked_by: Literal["top_two", "max"]) -> ExpertGroups | None:
    """Returns the groups from which experts are chosen, or None if all of them are chosen."""
    count, per_token = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    return None if count == per_token else ExpertGroups(count, per_token, ranked_by)


def _behind_dense(fields: ConfigFields, default: int) -> frozenset[int]:
    """Returns the layers that have experts, which are all but the first ones."""
    fields.refuse("moe_layer_freq", 1)
    return frozenset(range(int(fields.number("first_k_dense_replace", default)), fields.num_layers))


# Values that transformers leaves out, or that all releases have.
_V3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "n_group": 8,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 1,
}
_FEATURES = "latent attention with a latent KV cache, sigmoid routers with groups, shared experts"

DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "DeepSeek-V2, V2-Lite, V2.5, Coder-V2",
    "latent attention with a latent KV cache, groups of experts, shared experts",
    _deepseek_v2,
    {
        "vocab_size": 102400,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "q_lora_rank": 1536,
        "eos_token_id": 2,
    },
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "DeepSeek-V3, V3.1, R1, Kimi K2, Moonlight",
    _FEATURES,
    _deepseek_v3,
    _V3_DEFAULTS,
)
KIMI_K2 = Family("KimiK2ForCausalLM", "Kimi K2 under its own name", _FEATURES, _deepseek_v3, _V3_DEFAULTS)
GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM",
    "GLM-4.7-Flash",
    _FEATURES,
    _glm4_moe_lite,
    {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "eos_token_id": 1,
    },
)
