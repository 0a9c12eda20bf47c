"""Describes Gemma 4, whose layers with a window differ from the others in heads, head sizes and ropes.

Late layers may read the keys and values of earlier ones, tokens may have a vector for each layer, and a mixture of
experts may stand beside the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.experts_config import BesideMLP, ExpertsConfig
from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import NORMS_AROUND, AttentionConfig, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.per_layer_config import PerLayerConfig

POSITIONS = 131072
FULL = "full_attention"
PATTERN = 6  # without layer_types, every PATTERN-th layer sees all tokens
ROPES: dict[str, Any] = {
    WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
BESIDE = BesideMLP(
    dense_out_norm="post_feedforward_layernorm_1",
    in_norm="pre_feedforward_layernorm_2",
    out_norm="post_feedforward_layernorm_2",
    router_scale="router.scale",
)


def _gemma4(fields: ConfigFields) -> ModelConfig:
    kinds = fields.layer_types(lambda i: FULL if (i + 1) % PATTERN == 0 else WINDOWED)
    kinds[-1] = FULL  # as transformers does, whatever config.json says
    mlp = fields.mlp()
    wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size) if fields.flag("use_double_wide_mlp") else mlp
    layers = []
    for kind, own, shared in zip(kinds, _own_fields(fields, kinds), cache_layers(fields, kinds), strict=True):
        attention = replace(_attention(own, kind), cache_layer=shared)
        layers.append(LayerConfig(attention, mlp if shared is None else wide, NORMS_AROUND, scalar_name="layer_scalar"))
    return replace(
        fields.model(tuple(layers), POSITIONS),
        experts=_experts(fields),
        per_layer=per_layer(fields),
        embed_scale=fields.hidden_size**0.5,
        final_softcap=fields.raw.get("final_logit_softcapping"),
    )


def _attention(fields: ConfigFields, kind: str) -> AttentionConfig:
    """Returns the attention of a layer of this kind. `fields` has the layer's own sizes."""
    ropes = fields.raw.get("rope_parameters") or ROPES
    if not isinstance(ropes.get(kind), dict):
        raise ConfigError(f"config.json's rope_parameters have no entry for layers of {kind}.", "model")
    rope = ConfigFields({**fields.raw, "rope_parameters": ropes}, {}).rope(POSITIONS, layer_type=kind)
    if rope.depends_on_length:
        raise UnsupportedModel(f"rope_type={rope.rope_type!r} is not supported for one kind of layers.")
    bias = fields.flag("attention_bias")
    return replace(
        fields.attention(rope),
        scale=1.0,
        window=fields.integer("sliding_window", 512) if kind == WINDOWED else None,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        value_norm=True,
        k_is_v=kind == FULL and fields.flag("attention_k_eq_v"),
    )


def _own_fields(fields: ConfigFields, kinds: Sequence[str]) -> list[ConfigFields]:
    """Returns the fields of each layer with its own head size and number of KV heads.

    Published files have global_head_dim and num_global_key_value_heads for the layers that see all tokens. What
    transformers saves has per_layer_config instead, by the layer's number.
    """
    given = fields.raw.get("per_layer_config")
    if given is None:
        full: dict[str, Any] = {"head_dim": fields.integer("global_head_dim", 512)}
        if fields.flag("attention_k_eq_v") and fields.raw.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = fields.integer("num_global_key_value_heads", 1)
        given = {str(i): full for i, kind in enumerate(kinds) if kind == FULL}
    changed = {key for of_layer in given.values() for key in of_layer}
    if changed - {"head_dim", "num_key_value_heads"} or not all(name.isdecimal() for name in given):
        raise UnsupportedModel(
            f"per_layer_config of {', '.join(sorted(changed))} for {', '.join(given)} is not supported; only head_dim "
            "and num_key_value_heads of layers by their numbers are."
        )
    own = {int(name): of_layer for name, of_layer in given.items()}  # names may begin with zeros
    return [ConfigFields({**fields.raw, **own.get(i, {})}, {}) for i in range(len(kinds))]


def cache_layers(fields: ConfigFields, kinds: Sequence[str]) -> list[int | None]:
    """Returns the layer whose cache each layer reads, or None if it has its own. The last num_kv_shared_layers read
    the cache of the last earlier layer of their kind."""
    first_shared = max(0, fields.num_layers - (fields.raw.get("num_kv_shared_layers") or 0))
    last = {kind: i for i, kind in enumerate(kinds[:first_shared])}
    without = sorted(set(kinds[first_shared:]) - last.keys())
    if without:
        raise ConfigError(
            f"config.json's num_kv_shared_layers leaves no layer of {without[0]} whose keys and values later layers "
            "could read.",
            "model",
        )
    return [None if i < first_shared else last[kind] for i, kind in enumerate(kinds)]


def per_layer(fields: ConfigFields) -> PerLayerConfig | None:
    """Returns the per-layer embeddings, or None if config.json has none."""
    if not fields.raw.get("hidden_size_per_layer_input"):
        return None
    return PerLayerConfig(
        fields.integer("hidden_size_per_layer_input", 256),
        fields.integer("vocab_size_per_layer_input", 262144),
        fields.activation(),
    )


def _experts(fields: ConfigFields) -> ExpertsConfig | None:
    if not fields.flag("enable_moe_block"):
        return None
    activation = fields.activation()
    if activation not in ("silu", "gelu_tanh"):
        raise UnsupportedModel(f"hidden_activation {activation} is not supported for experts.")
    return ExpertsConfig(
        count=fields.integer("num_experts", 0),
        per_token=fields.integer("top_k_experts", 0),
        intermediate_size=fields.integer("moe_intermediate_size", 0),
        sums_to_one=True,
        layers=frozenset(range(fields.num_layers)),
        prefix="",
        beside=BESIDE,
        expert_scale_name="router.per_expert_scale",
        router_name="router.proj",
        activation=activation,
    )


_UNIFIED_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_DEFAULTS = _UNIFIED_DEFAULTS | {
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
_FEATURES = "heads and rope by kind of layer, shared keys and values, per-layer embeddings, experts beside the MLP"

GEMMA4 = Family("Gemma4ForCausalLM", "Gemma 4", _FEATURES, _gemma4, _DEFAULTS)
GEMMA4_OF_PICTURES = Family(
    "Gemma4ForConditionalGeneration",
    "Gemma 4 E2B, E4B, 26B-A4B, 31B",
    f"{_FEATURES}; text only",
    _gemma4,
    _DEFAULTS,
    is_wrapper=True,
)
GEMMA4_UNIFIED = Family("Gemma4UnifiedForCausalLM", "Gemma 4 12B", _FEATURES, _gemma4, _UNIFIED_DEFAULTS)
GEMMA4_UNIFIED_OF_PICTURES = Family(
    "Gemma4UnifiedForConditionalGeneration",
    "Gemma 4 12B",
    f"{_FEATURES}; text only",
    _gemma4,
    _UNIFIED_DEFAULTS,
    is_wrapper=True,
)
