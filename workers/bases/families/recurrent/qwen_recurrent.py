"""Describes Qwen3-Next and Qwen3.5, whose layers are recurrent except for every fourth, which has gated attention."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.qwen import POSITIONS
from lorafleet.workers.bases.layer_config import AttentionConfig, DeltaNetConfig, DeltaNetLayout, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle
from lorafleet.workers.bases.mtp_config import qwen_mtp

_FULL, _RECURRENT = "full_attention", "linear_attention"


def _qwen3_next(fields: ConfigFields) -> ModelConfig:
    every, dense = fields.integer("decoder_sparse_step", 1), fields.raw.get("mlp_only_layers") or []
    layers = frozenset(i for i in range(fields.num_layers) if i not in dense and (i + 1) % every == 0)
    model = _model(fields, kv_heads=2, mlp_default=5632, layout="grouped")
    if not layers:
        return model
    experts = _experts(fields, layers, count=512, per_token=10, sums_to_one=fields.flag("norm_topk_prob", True))
    return replace(model, experts=experts)


def _qwen3_5(fields: ConfigFields) -> ModelConfig:
    return _model(fields, kv_heads=4, mlp_default=12288)


def _qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    layers = frozenset(range(fields.num_layers))
    # All layers have experts, so the size of dense MLPs does not matter.
    model = _model(fields, kv_heads=2, mlp_default=512)
    return replace(model, experts=_experts(fields, layers, count=256, per_token=8, sums_to_one=True))


def _model(fields: ConfigFields, *, kv_heads: int, mlp_default: int, layout: DeltaNetLayout = "split") -> ModelConfig:
    """Returns the model with dense MLPs. The keyword arguments are the family's defaults, and its linears."""
    if fields.activation() != "silu":
        raise UnsupportedModel(f"hidden_act={fields.raw['hidden_act']!r} is not supported; only silu is.")
    mixers: dict[str, AttentionConfig | DeltaNetConfig] = {
        _FULL: _attention(fields, kv_heads),
        _RECURRENT: _delta_net(fields, layout),
    }
    interval = fields.integer("full_attention_interval", 4)
    kinds = fields.layer_types(lambda i: _RECURRENT if (i + 1) % interval else _FULL, served=tuple(mixers))
    if _FULL not in kinds:
        raise UnsupportedModel("layer_types without full_attention are not supported; at least one layer must have it.")
    mlp = fields.mlp(mlp_default)
    model = fields.model(tuple(LayerConfig(mixers[kind], mlp) for kind in kinds), POSITIONS)
    mtp = qwen_mtp(LayerConfig(mixers[_FULL], mlp)) if fields.num_mtp_layers("mtp_num_hidden_layers", 1) else None
    return replace(model, norm=NormStyle(model.norm.eps, adds_one=True), mtp_names=("mtp.",), mtp=mtp)


def _attention(fields: ConfigFields, kv_heads: int) -> AttentionConfig:
    fields.refuse("attn_output_gate", True)
    bias, rope = fields.flag("attention_bias"), fields.rope(POSITIONS, head_dim=256, partial=0.25)
    attention = fields.attention(rope, kv_heads=kv_heads, head_dim=256)
    return replace(attention, qkv_bias=bias, o_bias=bias, qk_norm="head", has_output_gate=True)


def _delta_net(fields: ConfigFields, layout: DeltaNetLayout) -> DeltaNetConfig:
    return checked_delta_net(
        DeltaNetConfig(
            num_k_heads=fields.integer("linear_num_key_heads", 16),
            num_v_heads=fields.integer("linear_num_value_heads", 32),
            k_dim=fields.integer("linear_key_head_dim", 128),
            v_dim=fields.integer("linear_value_head_dim", 128),
            conv_size=fields.integer("linear_conv_kernel_dim", 4),
            layout=layout,
        )
    )


def checked_delta_net(delta_net: DeltaNetConfig) -> DeltaNetConfig:
    """Returns the layer, or raises an error for sizes that are not served."""
    if delta_net.num_v_heads % delta_net.num_k_heads:
        raise ConfigError(
            f"config.json has linear_num_value_heads={delta_net.num_v_heads}, which is not a multiple of its "
            f"linear_num_key_heads={delta_net.num_k_heads}.",
            "model",
        )
    if delta_net.conv_size < 2:
        raise UnsupportedModel("linear_conv_kernel_dim=1 is not supported; it must be 2 or more.")
    return delta_net


def _experts(
    fields: ConfigFields, layers: frozenset[int], *, count: int, per_token: int, sums_to_one: bool
) -> ExpertsConfig:
    """Returns the experts of these layers. `count` and `per_token` are the family's defaults."""
    shared_size = fields.integer("shared_expert_intermediate_size", 512)
    return ExpertsConfig(
        count=fields.integer("num_experts", count),
        per_token=fields.integer("num_experts_per_tok", per_token),
        intermediate_size=fields.integer("moe_intermediate_size", 512),
        sums_to_one=sums_to_one,
        layers=layers,
        shared=SharedExpertConfig(shared_size, "shared_expert", gate_name="shared_expert_gate"),
    )


_RECURRENCE = "gated delta rule in three of four layers, gated attention in the others"

QWEN3_NEXT = Family("Qwen3NextForCausalLM", "Qwen3-Next", f"{_RECURRENCE}; a mixture of experts", _qwen3_next)
QWEN3_5 = Family("Qwen3_5ForCausalLM", "Qwen3.5, text part alone", _RECURRENCE, _qwen3_5)
QWEN3_5_OF_PICTURES = Family(
    "Qwen3_5ForConditionalGeneration", "Qwen3.5", f"text only; {_RECURRENCE}", _qwen3_5, is_wrapper=True
)
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM",
    "Qwen3.5 with experts, text part alone",
    f"{_RECURRENCE}; a mixture of experts",
    _qwen3_5_moe,
)
QWEN3_5_MOE_OF_PICTURES = Family(
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3.5 with experts",
    f"text only; {_RECURRENCE}; a mixture of experts",
    _qwen3_5_moe,
    is_wrapper=True,
)
