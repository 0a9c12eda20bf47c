"""Describes the layers of StableLM: layer norms, partly rotated heads, and perhaps attention and MLP side by side."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import NORMS_BEFORE, ONE_NORM, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle

POSITIONS = 4096


def _stablelm(fields: ConfigFields) -> ModelConfig:
    fields.refuse("qk_layernorm", False)
    attention = replace(fields.attention(fields.rope(POSITIONS, partial=0.25)), qkv_bias=fields.flag("use_qkv_bias"))
    layer = LayerConfig(attention, fields.mlp(), ONE_NORM if fields.flag("use_parallel_residual") else NORMS_BEFORE)
    norm = NormStyle(fields.number("layer_norm_eps", 1e-5), kind="layer", has_bias=True)
    return replace(fields.model(fields.equal_layers(layer), POSITIONS), norm=norm)


STABLELM = Family(
    "StableLmForCausalLM",
    "StableLM 3B, StableLM 2 1.6B",
    "layer norms, partly rotated heads",
    _stablelm,
    {"vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "eos_token_id": 0},
)
