"""Describes LFM2, whose layers have a short convolution except for some with attention. Some models have experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import AttentionConfig, LayerConfig, LayerNorms, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import ModuleNames
from lorafleet.workers.bases.recurrence_config import ShortConvConfig

POSITIONS = 128000
_ATTENTION, _CONV = "full_attention", "conv"


def _lfm2(fields: ConfigFields) -> ModelConfig:
    attending = fields.raw.get("full_attn_idxs")
    attending = range(fields.num_layers) if attending is None else attending
    size = fields.integer("block_ff_dim" if "block_ff_dim" in fields.raw else "intermediate_size", 12288)
    if fields.flag("block_auto_adjust_ff_dim", True):
        size = 2 * size // 3
        factor, multiple = fields.number("block_ffn_dim_multiplier", 1.0), fields.integer("block_multiple_of", 256)
        size = -(-int(factor * size) // multiple) * multiple
    return _model(fields, attending, size)


def _lfm2_moe(fields: ConfigFields) -> ModelConfig:
    dense = int(fields.number("num_dense_layers", 2))
    experts = ExpertsConfig(
        count=fields.integer("num_experts", 32),
        per_token=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("moe_intermediate_size", 1792),
        sums_to_one=fields.flag("norm_topk_prob", True),
        layers=frozenset(range(dense, fields.num_layers)),
        prefix="feed_forward.",
        scores="sigmoid",
        scaling=fields.number("routed_scaling_factor", 1.0),
        correction_name="expert_bias" if fields.flag("use_expert_bias", True) else None,
    )
    model = _model(fields, (), fields.integer("intermediate_size", 7168))
    if not experts.layers:
        return model
    return replace(model, experts=experts, names=MOE_NAMES)


def _model(fields: ConfigFields, attending: Sequence[int], mlp_size: int) -> ModelConfig:
    """Returns the model with dense MLPs. Without layer_types in config.json, the layers `attending` have attention."""
    kinds = fields.layer_types(lambda i: _ATTENTION if i in attending else _CONV, served=(_ATTENTION, _CONV))
    if _ATTENTION not in kinds:
        raise UnsupportedModel("layer_types without full_attention are not supported; at least one layer must have it.")
    conv = ShortConvConfig(fields.hidden_size, fields.integer("conv_L_cache", 3), fields.flag("conv_bias"))
    if conv.conv_size < 2:
        raise UnsupportedModel("conv_L_cache=1 is not supported; it must be 2 or more.")
    mixers: dict[str, AttentionConfig | ShortConvConfig] = {_ATTENTION: _attention(fields), _CONV: conv}
    mlp = MLPConfig(mlp_size, gate_name="feed_forward.w1", up_name="feed_forward.w3", down_name="feed_forward.w2")
    norms = LayerNorms("operator_norm", before_mlp="ffn_norm")
    layers = tuple(LayerConfig(mixers[kind], mlp, norms) for kind in kinds)
    model = fields.model(layers, POSITIONS, eps=1e-5, eps_key="norm_eps")
    tied = fields.flag("tie_embedding", model.tie_word_embeddings)
    return replace(model, final_norm="embedding_norm", tie_word_embeddings=tied)


def _attention(fields: ConfigFields) -> AttentionConfig:
    attention = fields.attention(fields.rope(POSITIONS, theta=1e6), kv_heads=8)
    return replace(
        attention,
        qk_norm="head",
        qk_norm_names=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        o_name="self_attn.out_proj",
    )


MOE_NAMES = ModuleNames(
    older=(
        ("feed_forward.experts.*.gate_proj", "feed_forward.experts.*.w1"),
        ("feed_forward.experts.*.up_proj", "feed_forward.experts.*.w3"),
        ("feed_forward.experts.*.down_proj", "feed_forward.experts.*.w2"),
    )
)
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}

LFM2 = Family(
    "Lfm2ForCausalLM",
    "LFM2 350M to 2.6B",
    "a gated short convolution in most layers, attention with norms of q and k in the others",
    _lfm2,
    _DEFAULTS | {"hidden_size": 2560},
)
LFM2_MOE = Family(
    "Lfm2MoeForCausalLM",
    "LFM2 8B-A1B",
    "a gated short convolution in most layers, a mixture of experts behind dense layers",
    _lfm2_moe,
    _DEFAULTS | {"hidden_size": 2048},
)
