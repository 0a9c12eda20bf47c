"""Describes the layers of EXAONE 4, which has norms behind attention and MLP, and norms of each head. Beside layers
with a window, full layers rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from lorafleet.workers.bases.families.config_fields import WINDOWED, ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import NORMS_AFTER, LayerConfig
from lorafleet.workers.bases.model_config import ModelConfig

POSITIONS = 2048


def _exaone4(fields: ConfigFields) -> ModelConfig:
    window = fields.raw.get("sliding_window", 4096)
    attention = replace(fields.attention(fields.rope(POSITIONS), kv_heads=32), qk_norm="head")
    # If any layer may have a window, the others rotate nothing.
    full = attention if window is None else replace(attention, rope=None)
    windowed = replace(attention, window=window)
    kinds = fields.layer_types(lambda i: _kind(fields, i) if window is not None else "full_attention")
    mlp = fields.mlp(16384)
    layers = tuple(LayerConfig(windowed if kind == WINDOWED else full, mlp, NORMS_AFTER) for kind in kinds)
    return fields.model(layers, POSITIONS, eps=1e-5)


def _kind(fields: ConfigFields, layer: int) -> str:
    """Returns the type of a layer if config.json has no layer_types. "LLLG" means the same pattern as 4."""
    pattern = fields.raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        is_last = layer == fields.num_layers - 1
        return "full_attention" if is_last or pattern[layer % len(pattern)] == "G" else WINDOWED
    return WINDOWED if pattern and (layer + 1) % pattern else "full_attention"


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    "EXAONE 4",
    "norms behind attention and MLP, norms of q and k, windows with rotation and full layers without",
    _exaone4,
    {"vocab_size": 102400, "eos_token_id": 2},
)
