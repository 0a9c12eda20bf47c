"""Describes Bamba, whose layers have a Mamba-2 state space except for a few with attention, and Falcon-H1, whose layers
have both in parallel."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.recurrent.mamba_fields import ATTENTION, RECURRENT, mamba_layer, require_attention
from lorafleet.workers.bases.layer_config import LayerConfig, LayerNorms, MLPConfig, ParallelMixerConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.recurrence_config import Multipliers

_NORMS = LayerNorms(before_mlp="pre_ff_layernorm")


def _bamba(fields: ConfigFields) -> ModelConfig:
    positions, attending = 262144, fields.raw.get("attn_layer_indices") or []
    kinds = [ATTENTION if i in attending else RECURRENT for i in range(fields.num_layers)]
    require_attention(kinds)
    bias = fields.flag("attention_bias")
    attention = fields.attention(fields.rope(positions, partial=0.5), kv_heads=8)
    attention = replace(attention, qkv_bias=bias, o_bias=bias)
    mamba = mamba_layer(fields, fields.integer("mamba_expand", 2) * fields.hidden_size)
    layers = tuple(LayerConfig(attention if kind == ATTENTION else mamba, _mlp(fields), _NORMS) for kind in kinds)
    return replace(fields.model(layers, positions, eps=1e-5), final_norm="final_layernorm")


def _falcon_h1(fields: ConfigFields) -> ModelConfig:
    positions, bias = 8192, fields.flag("attention_bias")
    attention = fields.attention(fields.rope(positions), kv_heads=8)
    # Rotations keep the factor of the keys, so that it can multiply the scores.
    scale = attention.scale * fields.number("key_multiplier", 1.0)
    attention = replace(attention, qkv_bias=bias, o_bias=bias, scale=scale)
    expanded = fields.integer("mamba_expand", 2) * fields.hidden_size
    inner = expanded if _is_null(fields, "mamba_d_ssm") else fields.integer("mamba_d_ssm", 1024)
    before_gate = fields.flag("mamba_norm_before_gate", True)
    mamba = replace(
        mamba_layer(fields, inner),
        out_bias=fields.flag("projectors_bias"),
        norm=("before_gate" if before_gate else "gated") if fields.flag("mamba_rms_norm") else None,
        multipliers=Multipliers(fields.number("ssm_in_multiplier", 1.0), *_numbers(fields, "ssm_multipliers", 5)),
    )
    mixer = ParallelMixerConfig(
        attention,
        mamba,
        attention_in=fields.number("attention_in_multiplier", 1.0),
        attention_out=fields.number("attention_out_multiplier", 1.0),
        mamba_out=fields.number("ssm_out_multiplier", 1.0),
    )
    gate, out = _numbers(fields, "mlp_multipliers", 2)
    mlp = replace(_mlp(fields), gate_multiplier=gate, out_multiplier=out)
    return replace(
        fields.model(fields.equal_layers(LayerConfig(mixer, mlp, _NORMS)), positions, eps=1e-5),
        final_norm="final_layernorm",
        embed_scale=fields.number("embedding_multiplier", 1.0),
        logits_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _mlp(fields: ConfigFields) -> MLPConfig:
    return replace(
        fields.mlp(14336, has_bias=fields.flag("mlp_bias")),
        gate_name="feed_forward.gate_proj",
        up_name="feed_forward.up_proj",
        down_name="feed_forward.down_proj",
    )


def _is_null(fields: ConfigFields, key: str) -> bool:
    return key in fields.raw and fields.raw[key] is None


def _numbers(fields: ConfigFields, key: str, count: int) -> list[float]:
    """Returns the numbers, which are ones if config.json has none."""
    given = fields.raw.get(key)
    if given is None:
        return [1.0] * count
    are_numbers = isinstance(given, list) and all(type(value) in (int, float) for value in given)
    if not are_numbers or len(given) != count:
        raise ConfigError(f"config.json has {key}={given!r}; it must be {count} numbers.", "model")
    return [float(value) for value in given]


_DEFAULTS = {"vocab_size": 128000, "intermediate_size": 14336, "eos_token_id": 2}

BAMBA = Family(
    "BambaForCausalLM",
    "Bamba 9B v1 and v2",
    "a Mamba-2 state space in most layers, partly rotated attention in the others",
    _bamba,
    _DEFAULTS,
)
FALCON_H1 = Family(
    "FalconH1ForCausalLM",
    "Falcon-H1 0.5B to 34B",
    "attention and a Mamba-2 state space in parallel in every layer, multipliers",
    _falcon_h1,
    _DEFAULTS,
)
