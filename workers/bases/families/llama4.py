"""Describes Llama 4, which has rotated layers with chunks among unrotated ones that see all tokens. The routers of its
mixtures scale the experts' inputs."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import AttentionConfig, LayerConfig, MLPConfig, QueryTemperature
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import ModuleNames

POSITIONS = 131072
CHUNKED = "chunked_attention"


def _llama4(fields: ConfigFields) -> ModelConfig:
    rotates = _rotates(fields)
    rotated, unrotated = _rotated(fields), _unrotated(fields)
    kinds = fields.layer_types(lambda i: CHUNKED if rotates[i] else "full_attention", (CHUNKED, "full_attention"))
    mlp = MLPConfig(fields.integer("intermediate_size_mlp", 16384), fields.activation())
    chunk = None if fields.raw["attention_chunk_size"] is None else fields.integer("attention_chunk_size", 8192)
    layers = tuple(
        LayerConfig(replace(rotated if turns else unrotated, chunk=chunk if kind == CHUNKED else None), mlp)
        for turns, kind in zip(rotates, kinds, strict=True)
    )
    sparse = _sparse_layers(fields)
    return replace(
        fields.model(layers, POSITIONS, eps=1e-5),
        experts=_experts(fields, sparse) if sparse else None,
        names=ModuleNames(newest=(("mlp", "feed_forward"),)),
    )


def _rotates(fields: ConfigFields) -> list[bool]:
    """Returns for each layer whether it rotates heads."""
    every = fields.integer("no_rope_layer_interval", 4)
    given = fields.raw.get("no_rope_layers") or [(i + 1) % every for i in range(fields.num_layers)]
    return [bool(turns) for turns in given[: fields.num_layers]]


def _rotated(fields: ConfigFields) -> AttentionConfig:
    attention = _attention(fields)
    rope = fields.rope(POSITIONS, theta=500000.0, head_dim=128, is_interleaved=True)
    if not fields.flag("use_qk_norm", True):
        return replace(attention, rope=rope)
    return replace(attention, rope=rope, qk_norm="head_after", qk_norm_names=None)


def _unrotated(fields: ConfigFields) -> AttentionConfig:
    attention = _attention(fields)
    if not fields.flag("attn_temperature_tuning", True):
        return attention
    period = fields.number("floor_scale", 8192)
    return replace(attention, temperature=QueryTemperature(fields.number("attn_scale", 0.1), period, offset=1))


def _attention(fields: ConfigFields) -> AttentionConfig:
    bias = fields.flag("attention_bias")
    return replace(fields.attention(None, kv_heads=8, head_dim=128), qkv_bias=bias, o_bias=bias)


def _sparse_layers(fields: ConfigFields) -> frozenset[int]:
    step, given = fields.integer("interleave_moe_layer_step", 1), fields.raw.get("moe_layers")
    return frozenset(range(step - 1, fields.num_layers, step) if given is None else given)


def _experts(fields: ConfigFields, layers: frozenset[int]) -> ExpertsConfig:
    inner = fields.integer("intermediate_size", 8192)
    return ExpertsConfig(
        count=fields.integer("num_local_experts", 16),
        per_token=fields.integer("num_experts_per_tok", 1),
        intermediate_size=inner,
        sums_to_one=False,
        layers=layers,
        scores="sigmoid",
        scales_input=True,
        router_name="router",
        activation=fields.expert_activation(),
        shared=SharedExpertConfig(inner, "shared_expert"),
        transposed=True,
        adapters_swapped=True,
    )


_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "attention_chunk_size": 8192,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": 2,
}
_FEATURES = "chunked attention, layers without rotation, a mixture in every layer or in every second one"

LLAMA4 = Family("Llama4ForCausalLM", "Llama 4, text part alone", _FEATURES, _llama4, _DEFAULTS)
LLAMA4_OF_PICTURES = Family(
    "Llama4ForConditionalGeneration",
    "Llama 4 Scout, Maverick",
    f"text only; {_FEATURES}",
    _llama4,
    _DEFAULTS,
    is_wrapper=True,
)
