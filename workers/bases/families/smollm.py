"""Describes the layers of SmolLM3: those of Llama, of which some rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig

POSITIONS = 32768


def _smollm3(fields: ConfigFields) -> ModelConfig:
    bias, every = fields.flag("attention_bias"), fields.integer("no_rope_layer_interval", 4)
    rope = fields.rope(POSITIONS, theta=2e6)
    attention = replace(fields.attention(rope, kv_heads=4), qkv_bias=bias, o_bias=bias)
    rotates = fields.raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(fields.num_layers)]
    window = fields.raw.get("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = fields.layer_types(lambda i: WINDOWED if window is not None and not rotates[i] else "full_attention")
    mlp = fields.mlp(has_bias=fields.flag("mlp_bias"))
    layers = (
        replace(attention, rope=rope if rotates[i] else None, window=window if kind == WINDOWED else None)
        for i, kind in enumerate(kinds)
    )
    return fields.model(tuple(LayerConfig(layer, mlp) for layer in layers), POSITIONS)


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "SmolLM3",
    "some layers without rotation",
    _smollm3,
    {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
    },
)
