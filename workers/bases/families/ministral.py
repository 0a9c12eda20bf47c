"""Describes the layers of Mistral, Ministral and Ministral 3, alone or beside a part for pictures: those of Llama, with
windows. Ministral 3 scales queries by their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import LayerConfig, QueryTemperature
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.rope_parameters import with_rope

POSITIONS = 4096 * 32
_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mistral(fields: ConfigFields) -> ModelConfig:
    if fields.raw.get("layer_types"):
        raise UnsupportedModel(
            "Mistral with layer_types is not supported. Set architectures in config.json to MinistralForCausalLM, "
            "which has them."
        )
    attention = fields.attention(fields.rope(POSITIONS), kv_heads=8)
    layer = LayerConfig(replace(attention, window=fields.raw.get("sliding_window", 4096)), fields.mlp(14336))
    return fields.model(fields.equal_layers(layer), POSITIONS)


def _ministral(fields: ConfigFields) -> ModelConfig:
    window = fields.raw.get("sliding_window", 4096)
    kinds = fields.layer_types(lambda _: "full_attention" if window is None else WINDOWED)
    layer = LayerConfig(fields.attention(fields.rope(POSITIONS), kv_heads=8), fields.mlp(14336))
    windows = [window if kind == WINDOWED else None for kind in kinds]
    return fields.model(fields.windowed_layers(layer, windows), POSITIONS)


def _ministral3(fields: ConfigFields) -> ModelConfig:
    fields = ConfigFields(with_rope(fields.raw, _MINISTRAL3_ROPE), {})
    positions, size = 262144, 128
    rope = fields.rope(positions, theta=1e6, head_dim=size)
    parameters = fields.raw.get("rope_parameters") or fields.raw["rope_scaling"]
    beta = float(parameters.get("llama_4_scaling_beta") or 0.0)
    attention = replace(
        fields.attention(rope, kv_heads=8, head_dim=size),
        window=fields.raw.get("sliding_window"),
        temperature=QueryTemperature(beta, rope.original_max_position_embeddings) if beta else None,
    )
    layer = LayerConfig(attention, fields.mlp(14336))
    return fields.model(fields.equal_layers(layer), positions, eps=1e-5)


def _mistral3(fields: ConfigFields) -> ModelConfig:
    """Returns the language model beside a part for pictures. It is Mistral or Ministral 3."""
    fields.refuse("model_type", "mistral", "ministral3", "mistral3")
    return (_ministral3 if fields.raw.get("model_type") == "ministral3" else _mistral)(fields)


MISTRAL = Family("MistralForCausalLM", "Mistral", "sliding window", _mistral)
MINISTRAL = Family("MinistralForCausalLM", "Ministral 8B", "a window per layer", _ministral, {"eos_token_id": 2})
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    "Ministral 3 as a language model alone",
    "yarn, queries scaled by position",
    _ministral3,
    {"vocab_size": 131072, "num_hidden_layers": 34, "eos_token_id": 2},
)
MISTRAL3 = Family(
    "Mistral3ForConditionalGeneration",
    "Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2, Magistral Small 1.2",
    "text only",
    _mistral3,
    {"eos_token_id": 2, "tie_word_embeddings": True},
    is_wrapper=True,
)
