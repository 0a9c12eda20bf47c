"""Describes Gemma 3n, which has several residual streams, per-layer embeddings, gates of which most numbers are zero,
and late layers that read the keys and values of earlier ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.altup_config import AltUpConfig
from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.families.gemma4 import FULL, cache_layers, per_layer
from lorafleet.workers.bases.layer_config import NORMS_AROUND, LayerConfig, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.rope_parameters import rope_by_layer_type

POSITIONS = 32768
PATTERN = 5  # without layer_types, every PATTERN-th layer sees all tokens
MOST_SPARSE = 10  # without activation_sparsity_pattern, the first layers of a larger model have sparse gates


def _gemma3n(fields: ConfigFields) -> ModelConfig:
    kinds = fields.layer_types(lambda i: FULL if (i + 1) % PATTERN == 0 else WINDOWED)
    full_rope, sliding_rope = rope_by_layer_type(fields.raw, fields.head_dim(), fields.max_positions(POSITIONS))
    bias = fields.flag("attention_bias")
    attention = replace(
        fields.attention(full_rope), scale=1.0, qkv_bias=bias, o_bias=bias, qk_norm="head", value_norm=True
    )
    sliding = replace(attention, rope=sliding_rope, window=fields.integer("sliding_window", 512))
    layers = tuple(
        LayerConfig(replace(sliding if kind == WINDOWED else attention, cache_layer=shared), mlp, NORMS_AROUND)
        for kind, shared, mlp in zip(kinds, cache_layers(fields, kinds), _mlps(fields), strict=True)
    )
    return replace(
        fields.model(layers, POSITIONS),
        altup=_altup(fields),
        per_layer=per_layer(fields),
        embed_scale=fields.hidden_size**0.5,
        final_softcap=fields.raw.get("final_logit_softcapping"),
    )


def _mlps(fields: ConfigFields) -> list[MLPConfig]:
    """Returns the MLP of each layer, whose sizes and sparsities are lists in config.json."""
    count = fields.num_layers
    sizes = fields.raw["intermediate_size"]
    sizes = sizes if isinstance(sizes, list) else [sizes] * count
    sparsities = fields.raw.get("activation_sparsity_pattern")
    if sparsities is None:
        num_sparse = MOST_SPARSE if count > MOST_SPARSE else 0
        sparsities = [0.95] * num_sparse + [0.0] * (count - num_sparse)
    for key, values in (("intermediate_size", sizes), ("activation_sparsity_pattern", sparsities)):
        if not isinstance(values, list) or len(values) != count:
            raise ConfigError(f"config.json has {key}={values!r}; it must have a number for each of {count} layers.")
    if not all(0 <= sparsity < 1 for sparsity in sparsities):
        raise ConfigError(f"config.json has activation_sparsity_pattern={sparsities}; all must be in [0, 1).")
    own = (ConfigFields({**fields.raw, "intermediate_size": size}, {}).mlp() for size in sizes)
    return [replace(mlp, sparsity=float(sparsity)) for mlp, sparsity in zip(own, sparsities, strict=True)]


def _altup(fields: ConfigFields) -> AltUpConfig:
    count, active = fields.integer("altup_num_inputs", 4), fields.raw.get("altup_active_idx", 0)
    if active not in range(count):
        raise UnsupportedModel(f"altup_active_idx={active!r} is not one of altup_num_inputs={count}.")
    return AltUpConfig(count, active, fields.flag("altup_correct_scale", True), fields.integer("laurel_rank", 64))


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 15,
}
_FEATURES = "four residual streams (AltUp), LAuReL, per-layer embeddings, sparse gates, shared keys and values"

GEMMA3N = Family("Gemma3nForCausalLM", "Gemma 3n", _FEATURES, _gemma3n, _DEFAULTS)
GEMMA3N_OF_PICTURES = Family(
    "Gemma3nForConditionalGeneration",
    "Gemma 3n E2B, E4B",
    f"{_FEATURES}; text only",
    _gemma3n,
    _DEFAULTS,
    is_wrapper=True,
)
