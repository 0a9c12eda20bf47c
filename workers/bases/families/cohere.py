"""Describes the layers of Cohere 1 and 2: attention and MLP stand side by side behind one layer norm. In Cohere 2, only
layers with a window rotate heads."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import ONE_NORM, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle

POSITIONS = 8192


def _cohere2(fields: ConfigFields) -> ModelConfig:
    bias, pattern = fields.flag("attention_bias"), fields.integer("sliding_window_pattern", 4)
    full = replace(fields.attention(None), qkv_bias=bias, o_bias=bias)
    rope = fields.rope(POSITIONS, is_interleaved=True)
    windowed = replace(full, rope=rope, window=fields.integer("sliding_window", 4096))
    kinds = fields.layer_types(lambda i: WINDOWED if (i + 1) % pattern else "full_attention")
    mlp = fields.mlp()
    return _model(fields, tuple(LayerConfig(windowed if kind == WINDOWED else full, mlp, ONE_NORM) for kind in kinds))


def _cohere(fields: ConfigFields) -> ModelConfig:
    fields.refuse("use_qk_norm", False)
    bias, rope = fields.flag("attention_bias"), fields.rope(POSITIONS, theta=5e5, is_interleaved=True)
    attention = replace(fields.attention(rope), qkv_bias=bias, o_bias=bias)
    return _model(fields, fields.equal_layers(LayerConfig(attention, fields.mlp(), ONE_NORM)))


def _model(fields: ConfigFields, layers: tuple[LayerConfig, ...]) -> ModelConfig:
    return replace(
        fields.model(layers, POSITIONS),
        norm=NormStyle(fields.number("layer_norm_eps", 1e-5), kind="layer"),
        logits_scale=fields.number("logit_scale", 0.0625),
    )


_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "eos_token_id": 255001,
    "tie_word_embeddings": True,
}

COHERE = Family(
    "CohereForCausalLM", "Command R without norms of q and k", "attention and MLP side by side", _cohere, _DEFAULTS
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    "Command R7B, Command A",
    "attention and MLP side by side, layer norms, windows with rotation and full layers without",
    _cohere2,
    _DEFAULTS,
)
