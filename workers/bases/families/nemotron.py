"""Describes the layers of Nemotron 3 and 4, and of Minitron: layer norms whose weights are stored minus one, partly
rotated heads, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle

POSITIONS = 4096


def _nemotron(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    attention = replace(fields.attention(fields.rope(POSITIONS, partial=0.5)), qkv_bias=bias, o_bias=bias)
    layer = LayerConfig(attention, replace(fields.mlp(has_bias=fields.flag("mlp_bias")), gate_name=None))
    norm = NormStyle(fields.number("norm_eps", 1e-5), kind="layer", has_bias=True, adds_one=True)
    return replace(fields.model(fields.equal_layers(layer), POSITIONS), norm=norm)


NEMOTRON = Family(
    "NemotronForCausalLM",
    "Nemotron 3 and 4, Minitron",
    "layer norms, partly rotated heads, an MLP without a gate",
    _nemotron,
    {
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "eos_token_id": 3,
    },
)
