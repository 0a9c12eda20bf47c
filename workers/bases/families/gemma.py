"""Describes the layers of Gemma, which has scaled embeddings, and norms whose weights are stored minus one. Gemma 2 and
3 have norms around attention and MLP, windows, capped scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import NORMS_AROUND, AttentionConfig, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.rope_parameters import rope_by_layer_type

POSITIONS = 8192


def _gemma1(fields: ConfigFields) -> ModelConfig:
    """Returns the settings of Gemma 1, whose activation is always the tanh approximation, also if it is named gelu."""
    fields.refuse("hidden_act", "gelu", "gelu_pytorch_tanh")
    fields.refuse("hidden_activation", "gelu_pytorch_tanh")
    bias = fields.flag("attention_bias")
    attention = replace(fields.attention(fields.rope(POSITIONS)), qkv_bias=bias, o_bias=bias)
    model = fields.model(
        fields.equal_layers(LayerConfig(attention, replace(fields.mlp(), activation="gelu_tanh"))), POSITIONS
    )
    return replace(model, norm=NormStyle(model.norm.eps, adds_one=True), embed_scale=fields.hidden_size**0.5)


def _gemma2(fields: ConfigFields) -> ModelConfig:
    rope = fields.rope(POSITIONS)
    attention = replace(_attention(fields, rope), softcap=fields.raw.get("attn_logit_softcapping"))
    return _gemma(fields, attention, pattern=2, sliding_rope=rope)


def _gemma3(fields: ConfigFields) -> ModelConfig:
    """Returns the settings of Gemma 3, where each kind of layer has its own rope."""
    if fields.raw.get("attn_logit_softcapping") is not None:
        raise UnsupportedModel("attn_logit_softcapping of Gemma 3 is not supported; transformers does not apply it.")
    rope, sliding_rope = rope_by_layer_type(fields.raw, fields.head_dim(), fields.max_positions(POSITIONS))
    attention = replace(_attention(fields, rope), qk_norm="head")
    return _gemma(fields, attention, fields.integer("sliding_window_pattern", 6), sliding_rope)


def _gemma3_of_pictures(fields: ConfigFields) -> ModelConfig:
    if fields.raw.get("final_logit_softcapping") is not None:
        raise UnsupportedModel(
            f"final_logit_softcapping of {fields.raw['architectures'][0]} is not supported; transformers does not "
            "apply it."
        )
    return _gemma3(fields)


def _attention(fields: ConfigFields, rope: RopeConfig) -> AttentionConfig:
    bias = fields.flag("attention_bias")
    scale = float(fields.raw["query_pre_attn_scalar"]) ** -0.5
    return replace(fields.attention(rope), scale=scale, qkv_bias=bias, o_bias=bias)


def _gemma(fields: ConfigFields, attention: AttentionConfig, pattern: int, sliding_rope: RopeConfig) -> ModelConfig:
    """Returns what Gemma 2 and 3 share. Without layer_types, every pattern-th layer sees all tokens."""
    kinds = fields.layer_types(lambda i: WINDOWED if (i + 1) % pattern else "full_attention")
    sliding = replace(attention, window=fields.integer("sliding_window", 4096), rope=sliding_rope)
    mlp = fields.mlp()
    layers = tuple(LayerConfig(sliding if kind == WINDOWED else attention, mlp, NORMS_AROUND) for kind in kinds)
    model = fields.model(layers, POSITIONS)
    return replace(
        model,
        norm=NormStyle(model.norm.eps, adds_one=True),
        embed_scale=fields.hidden_size**0.5,
        final_softcap=fields.raw.get("final_logit_softcapping"),
    )


_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA2_DEFAULTS = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS = _DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072}

GEMMA = Family(
    "GemmaForCausalLM",
    "Gemma 1, CodeGemma",
    "scaled embeddings",
    _gemma1,
    {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 256,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "Gemma 2",
    "capped scores and logits, alternating windows, norms before and after attention and MLP",
    _gemma2,
    _DEFAULTS | _GEMMA2_DEFAULTS,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM", "Gemma 3 270M, 1B", "windows and rope depend on the kind of layer", _gemma3, _GEMMA3_DEFAULTS
)
GEMMA3_OF_PICTURES = Family(
    "Gemma3ForConditionalGeneration",
    "Gemma 3, 4B and larger",
    "text only",
    _gemma3_of_pictures,
    _GEMMA3_DEFAULTS,
    is_wrapper=True,
)
