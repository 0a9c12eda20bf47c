"""Describes Qwen 2 and 3: biases of q, k and v, or norms of each head of q and k. Some layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig

POSITIONS = 32768


def _qwen2(fields: ConfigFields) -> ModelConfig:
    attention = replace(fields.attention(fields.rope(POSITIONS), kv_heads=32), qkv_bias=True)
    layer = LayerConfig(attention, fields.mlp())
    return fields.model(fields.windowed_layers(layer, _windows(fields)), POSITIONS)


def _qwen3(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    attention = fields.attention(fields.rope(POSITIONS, head_dim=128), kv_heads=32, head_dim=128)
    attention = replace(attention, qkv_bias=bias, o_bias=bias, qk_norm="head")
    layer = LayerConfig(attention, fields.mlp())
    return fields.model(fields.windowed_layers(layer, _windows(fields)), POSITIONS)


def window(fields: ConfigFields) -> int | None:
    """Returns the window of the layers that have one."""
    return fields.raw.get("sliding_window", 4096) if fields.flag("use_sliding_window") else None


def _windows(fields: ConfigFields) -> list[int | None]:
    size, first = window(fields), fields.raw.get("max_window_layers", 28)
    kinds = fields.layer_types(lambda i: WINDOWED if i >= first else "full_attention")
    return [size if kind == WINDOWED else None for kind in kinds]


_VL_DEFAULTS = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}

QWEN2 = Family("Qwen2ForCausalLM", "Qwen2, 2.5", "biases of q, k and v; a window per layer", _qwen2)
QWEN3 = Family("Qwen3ForCausalLM", "Qwen3", "norms of q and k; a window per layer", _qwen3)
QWEN2_VL = Family("Qwen2VLForConditionalGeneration", "Qwen2-VL", "text only", _qwen2, _VL_DEFAULTS, is_wrapper=True)
QWEN2_5_VL = Family(
    "Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", "text only", _qwen2, _VL_DEFAULTS, is_wrapper=True
)
QWEN3_VL = Family(
    "Qwen3VLForConditionalGeneration",
    "Qwen3-VL without experts",
    "text only",
    _qwen3,
    {"rope_theta": 5e5, "max_position_embeddings": 128000, "intermediate_size": 22016},
    is_wrapper=True,
)
