"""Describes the layers of OLMo. OLMo 1 has layer norms without weights. In OLMo 2 and 3, norms stand behind attention
and MLP instead of before them, and all heads of q share a norm, as do those of k. In OLMo 3, most layers have a window,
and only the others scale the rope."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import NORMS_AFTER, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle

POSITIONS = 2048


def _olmo(fields: ConfigFields) -> ModelConfig:
    fields.refuse("clip_qkv", None)
    bias = fields.flag("attention_bias")
    attention = replace(fields.attention(fields.rope(POSITIONS)), qkv_bias=bias, o_bias=bias)
    model = fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp())), POSITIONS)
    return replace(model, norm=NormStyle(1e-5, kind="layer", has_weight=False))


def _olmo2(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    attention = replace(fields.attention(fields.rope(POSITIONS)), qkv_bias=bias, o_bias=bias, qk_norm="row")
    return fields.model(fields.equal_layers(LayerConfig(attention, fields.mlp(), NORMS_AFTER)), POSITIONS, eps=1e-5)


def _olmo3(fields: ConfigFields) -> ModelConfig:
    """Returns the settings of OLMo 3. As in transformers 4, a single rope_theta holds for all layers, but a single
    rope_scaling holds for those without a window."""
    bias, theta = fields.flag("attention_bias"), 500000.0
    plain = ConfigFields({key: value for key, value in fields.raw.items() if key != "rope_scaling"}, {})
    attention = fields.attention(fields.rope(POSITIONS, theta=theta, layer_type="full_attention"))
    full = replace(attention, qkv_bias=bias, o_bias=bias, qk_norm="row")
    rope = replace(plain.rope(POSITIONS, theta=theta, layer_type=WINDOWED), is_local=True)
    windowed = replace(full, rope=rope, window=fields.integer("sliding_window", 4096))
    kinds = fields.layer_types(lambda i: WINDOWED if (i + 1) % 4 else "full_attention")
    mlp = fields.mlp()
    layers = tuple(LayerConfig(windowed if kind == WINDOWED else full, mlp, NORMS_AFTER) for kind in kinds)
    return fields.model(layers, POSITIONS, eps=1e-5)


OLMO = Family(
    "OlmoForCausalLM",
    "OLMo 1",
    "layer norms without weights",
    _olmo,
    {"vocab_size": 50304, "eos_token_id": 50279},
)
OLMO2 = Family("Olmo2ForCausalLM", "OLMo 2", "norms behind attention and MLP, norms of all heads together", _olmo2)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "OLMo 3",
    "OLMo 2 with windows; rope scaling in full layers only",
    _olmo3,
    {"vocab_size": 50304, "eos_token_id": 50279},
)
