"""Describes the layers of Phi. Those of Phi-3 and 4 have fused q/k/v and gate/up, heads that may be rotated in part,
and longrope. Phi-1.5 and 2 have attention and MLP side by side behind one layer norm, and biases everywhere.
Phi-3.5-MoE has experts and layer norms."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.mixtures import MIXTRAL_NAMES
from lorafleet.workers.bases.layer_config import ONE_NORM, LayerConfig, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle
from lorafleet.workers.bases.module_names import ModuleNames
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.rope_parameters import phi3_rope


def _phi3(fields: ConfigFields) -> ModelConfig:
    attention = replace(fields.attention(phi3_rope(fields.raw)), window=fields.raw.get("sliding_window"), is_fused=True)
    layer = LayerConfig(attention, replace(fields.mlp(), is_fused=True))
    return fields.model(fields.equal_layers(layer), 4096)


def _phi(fields: ConfigFields) -> ModelConfig:
    fields.refuse("qk_layernorm", False)
    positions = 2048
    attention = replace(
        fields.attention(fields.rope(positions, partial=0.5)), qkv_bias=True, o_bias=True, o_name="self_attn.dense"
    )
    mlp = MLPConfig(
        fields.integer("intermediate_size", 8192),
        fields.activation(),
        has_bias=True,
        gate_name=None,
        up_name="mlp.fc1",
        down_name="mlp.fc2",
    )
    return replace(
        fields.model(fields.equal_layers(LayerConfig(attention, mlp, ONE_NORM)), positions),
        norm=NormStyle(fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True),
        final_norm="final_layernorm",
        head_bias=True,
    )


PHIMOE_NAMES = ModuleNames(newest=(("mlp.gate", "mlp.router"),), older=MIXTRAL_NAMES.older)


def _phimoe(fields: ConfigFields) -> ModelConfig:
    fields.refuse("num_experts_per_tok", 2)  # transformers chooses two, whatever config.json says
    positions, bias = 4096 * 32, fields.flag("attention_bias")
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 16),
        per_token=2,
        intermediate_size=fields.integer("intermediate_size", 6400),
        sums_to_one=False,
        layers=frozenset(range(fields.num_layers)),
        scores="sparsemixer",
        nearness=2 * fields.number("router_jitter_noise", 0.01),
        activation=fields.expert_activation(),
    )
    attention = replace(
        fields.attention(_phimoe_rope(fields), kv_heads=8),
        qkv_bias=bias,
        o_bias=bias,
        window=fields.raw.get("sliding_window"),
    )
    model = fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp())), positions)
    return replace(
        model,
        norm=NormStyle(fields.number("rms_norm_eps", 1e-5), kind="layer", has_bias=True),
        head_bias=fields.flag("lm_head_bias"),
        experts=experts,
        names=PHIMOE_NAMES,
    )


def _phimoe_rope(fields: ConfigFields) -> RopeConfig:
    """Returns Phi-3's rope, whose factor of cos and sin config.json says."""
    rope = phi3_rope(fields.raw)
    scaling = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    factors = {scaling.get("short_mscale"), scaling.get("long_mscale")}
    if rope.rope_type == "default":
        return rope
    if len(factors) != 1 or not isinstance(factor := factors.pop(), float):
        raise UnsupportedModel("short_mscale and long_mscale must be one number; different ones are not supported.")
    return replace(rope, attention_factor=factor)


PHI = Family(
    "PhiForCausalLM",
    "Phi-1, 1.5 and 2",
    "attention and MLP side by side, layer norms, partly rotated heads, biases, also of the head",
    _phi,
    {
        "vocab_size": 51200,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "hidden_act": "gelu_new",
        "eos_token_id": 2,
    },
)
PHI3 = Family(
    "Phi3ForCausalLM",
    "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    "longrope, partly rotated heads, fused q/k/v and gate/up",
    _phi3,
    {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "eos_token_id": 32000,
    },
)
PHIMOE = Family(
    "PhimoeForCausalLM",
    "Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE",
    "layer norms, longrope, a mixture in every layer whose router is SparseMixer, biases",
    _phimoe,
    {
        "vocab_size": 32064,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 6400,
        "max_position_embeddings": 4096 * 32,
        "rope_theta": 1e6,
        "eos_token_id": 2,
    },
)
