"""Describes the layers of Granite 3 and 4: those of Llama, with multipliers on embedding, scores, residual and logits.
Some models have a mixture of experts. Most layers of Granite 4 H have a Mamba-2 state space in place of attention."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.recurrent.mamba_fields import RECURRENT, layer_kinds, mamba_layer
from lorafleet.workers.bases.layer_config import LayerConfig, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import ModuleNames
from lorafleet.workers.bases.rope_config import RopeConfig

POSITIONS = 2048


def _granite3(fields: ConfigFields) -> ModelConfig:
    return _granite(fields, fields.rope(POSITIONS), fields.mlp(has_bias=fields.flag("mlp_bias")))


def _granite4(fields: ConfigFields) -> ModelConfig:
    """Returns the settings of Granite 4, whose layers have attention or a state space."""
    given = fields.raw.get("layer_types") or fields.raw.get("layers_block_type")
    kinds = layer_kinds(fields, given, [RECURRENT] * fields.num_layers)
    mlp = MLPConfig(
        fields.integer("shared_intermediate_size", 1024),
        fields.activation(),
        is_fused=True,
        fused_name="shared_mlp.input_linear",
        down_name="shared_mlp.output_linear",
    )
    rotates = fields.raw.get("position_embedding_type") == "rope"
    model = _granite(fields, fields.rope(POSITIONS) if rotates else None, mlp)
    if RECURRENT in kinds:
        mamba = mamba_layer(fields, fields.integer("mamba_expand", 2) * fields.hidden_size)
        pairs = zip(model.layers, kinds, strict=True)
        layers = tuple(replace(layer, mixer=mamba) if kind == RECURRENT else layer for layer, kind in pairs)
        model = replace(model, layers=layers)
    if not fields.raw.get("num_local_experts", 8):
        return model
    return replace(model, experts=_experts(fields, fields.integer("shared_intermediate_size", 1024)), names=MOE_NAMES)


def _granite(fields: ConfigFields, rope: RopeConfig | None, mlp: MLPConfig) -> ModelConfig:
    bias, scale = fields.flag("attention_bias"), fields.number("attention_multiplier", 1.0)
    layer = LayerConfig(replace(fields.attention(rope), qkv_bias=bias, o_bias=bias, scale=scale), mlp)
    return replace(
        fields.model(fields.equal_layers(layer), POSITIONS),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=1.0 / fields.number("logits_scaling", 1.0),
    )


def _granite_moe(fields: ConfigFields) -> ModelConfig:
    experts = _experts(fields, fields.raw.get("shared_intermediate_size") or 0)
    return replace(_granite3(fields), experts=experts, names=MOE_NAMES)


def _experts(fields: ConfigFields, shared_size: int) -> ExpertsConfig:
    """Returns the experts of all layers, with a shared one if it has a size."""
    return ExpertsConfig(
        count=fields.integer("num_local_experts", 8),
        per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size", 11008),
        sums_to_one=True,
        layers=frozenset(range(fields.num_layers)),
        router_name="router",
        activation=fields.expert_activation(),
        shared=_shared(shared_size) if shared_size else None,
    )


def _shared(size: int) -> SharedExpertConfig:
    return SharedExpertConfig(size, "shared_mlp", fused_name="input_linear", down_name="output_linear")


MOE_NAMES = ModuleNames(
    newest=(("mlp.shared_mlp", "shared_mlp"), ("mlp", "block_sparse_moe")),
    older=(
        ("mlp.router", "block_sparse_moe.router.layer"),
        ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ),
)

_MOE_DEFAULTS = {"eos_token_id": 2}

GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "Granite 3.0 and 3.1 1B-A400M, 3B-A800M",
    "multipliers, a mixture in every layer",
    _granite_moe,
    _MOE_DEFAULTS,
)
GRANITE_MOE_SHARED = Family(
    "GraniteMoeSharedForCausalLM",
    "Granite mixtures with a shared expert",
    "multipliers, a mixture and a shared expert in every layer",
    _granite_moe,
    _MOE_DEFAULTS,
)
GRANITE = Family("GraniteForCausalLM", "Granite 3, 3.1 to 3.3", "multipliers", _granite3)
GRANITE4 = Family(
    "GraniteMoeHybridForCausalLM",
    "Granite 4.0 Small, Tiny, Micro, 1B and 350M, with H in their names or without",
    "multipliers, fused gate and up; a Mamba-2 state space in most layers, attention in the others; experts",
    _granite4,
)
