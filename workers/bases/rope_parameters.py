"""Reads a model's rope from its config.json, and rejects by name what is not supported.

transformers 4 writes rope_theta and rope_scaling. Version 5 writes rope_parameters, perhaps nested by kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.rope_config import RopeConfig, RopeType

ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rope(
    raw: dict[str, Any],
    head_dim: int,
    max_positions: int,
    default_theta: float,
    layer_type: str | None = None,
    default_partial: float | None = None,
) -> RopeConfig:
    """Reads the rope of all layers, or of those of one type.

    Args:
        head_dim: numbers of a head, of which the first partial_rotary_factor are rotated.
        layer_type: the key of rope_parameters under which version 5 nests this type's parameters.
        default_partial: the default of partial_rotary_factor; None if the family rotates whole heads only.
    """
    scaling = _rope_parameters(raw, layer_type)
    if scaling.get("rope_type") == "proportional":
        return _proportional(raw, scaling, head_dim, max_positions, default_theta)
    rotary_dim = _rotary_dim(head_dim, _partial(raw, scaling, default_partial))
    return _rope(raw, scaling, rotary_dim, max_positions, default_theta)


def _proportional(
    raw: dict[str, Any], scaling: dict[str, Any], head_dim: int, max_positions: int, default_theta: float
) -> RopeConfig:
    """Returns a rope in which partial_rotary_factor is the share of a head's pairs that turn. Pairs and frequencies are
    those of a head that turns whole."""
    partial = float(scaling.get("partial_rotary_factor") or 1.0)
    if not 0 < partial <= 1:
        raise ConfigError(f"config.json has partial_rotary_factor={partial}; it must be in (0, 1].", "model")
    return RopeConfig(
        rotary_dim=_rotary_dim(head_dim, 1.0),
        theta=_theta(raw, scaling, default_theta),
        max_position_embeddings=max_positions,
        rope_type="proportional",
        factor=float(scaling.get("factor") or 1.0),
        turning_pairs=int(partial * head_dim // 2),
    )


def with_rope(raw: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the family's own rope parameters if it has none."""
    has_rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    return raw if has_rope else raw | {"rope_parameters": default}


def rope_by_layer_type(raw: dict[str, Any], head_dim: int, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Returns Gemma 3's two ropes: for layers that see all tokens, and for layers with a window."""
    scaling = raw.get("rope_parameters") or {}
    if set(scaling) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(f"rope_parameters {sorted(scaling)} are not supported; only those by layer type are.")
    full = {"rope_theta": raw.get("rope_theta", 1_000_000.0)} | (scaling.get("full_attention") or {})
    sliding = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)} | (scaling.get("sliding_attention") or {})
    ropes = []
    for kind in (full | (raw.get("rope_scaling") or {}), sliding):
        rope = _rope(raw, kind, _rotary_dim(head_dim, _partial(raw, kind, None)), max_positions)
        if rope.depends_on_length:
            raise UnsupportedModel(f"rope_type={rope.rope_type!r} is not supported for Gemma 3.")
        ropes.append(rope)
    return ropes[0], ropes[1]


def phi3_rope(raw: dict[str, Any]) -> RopeConfig:
    """Returns Phi-3's rope, which rotates the first numbers of a head, with the factors of longrope or without."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    rotary_dim, positions = _rotary_dim(head_dim, _partial(raw, scaling, 1.0)), raw["max_position_embeddings"]
    plain = RopeConfig(rotary_dim, _theta(raw, scaling), positions)
    if kind == "default":
        return plain
    if kind not in ("longrope", "su", "yarn"):  # all are names that longrope has had
        raise UnsupportedModel(f"rope_type={kind!r} is not supported for Phi-3; only longrope is.")
    factors: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        values = scaling.get(name)
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise ConfigError(f"config.json's rope scaling has no {name} with {rotary_dim // 2} numbers.", "model")
        factors[name] = tuple(map(float, values))
    trained = _trained_positions(raw, scaling, positions)
    return replace(
        plain,
        rope_type="longrope",
        factor=float(scaling.get("factor") or positions / trained),
        original_max_position_embeddings=trained,
        attention_factor=scaling.get("attention_factor"),
        **factors,
    )


def scaled_rope(base: RopeConfig, scaling: Mapping[str, str | float | bool], positions: int) -> RopeConfig:
    """Returns the base's rope with another scaling in place of its own. `positions` is ModelConfig.rope_positions."""
    rope = _rope({}, dict(scaling), base.rotary_dim, positions, base.theta)
    return replace(rope, is_interleaved=base.is_interleaved)


def _rope_parameters(raw: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """Returns the rope parameters, as transformers 4 or 5 writes them."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    nested = [key for key, value in scaling.items() if isinstance(value, dict)]
    if nested and layer_type is not None:
        return dict(scaling.get(layer_type) or {})
    if nested:
        raise UnsupportedModel(f"rope parameters by layer type ({', '.join(nested)}) are not supported.")
    return scaling


def _partial(raw: dict[str, Any], scaling: dict[str, Any], default: float | None) -> float:
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or default
    if default is None and partial not in (None, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor={partial} is not supported; only 1.0 is.")
    return float(partial or 1.0)


def _rotary_dim(head_dim: int, partial: float) -> int:
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor={partial} of head_dim={head_dim} gives an odd number of rotated dimensions "
            f"({rotary_dim}), which is not supported."
        )
    return rotary_dim


def _rope(
    raw: dict[str, Any], scaling: dict[str, Any], rotary_dim: int, max_positions: int, default_theta: float = 10000.0
) -> RopeConfig:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "mrope":  # the sections differ for pictures only
        kind = "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"rope_type={kind!r} is not supported; only {', '.join(ROPE_TYPES)} are.")
    trained = _trained_positions(raw, scaling, max_positions)
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / trained
    if factor is None and kind != "default":
        raise ConfigError(f"config.json's rope scaling {kind!r} has no factor.", "model")
    optional: dict[str, Any] = {
        key: float(scaling[key])
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if scaling.get(key) is not None
    }
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=_theta(raw, scaling, default_theta),
        max_position_embeddings=max_positions,
        rope_type=kind,
        factor=float(factor or 1.0),
        original_max_position_embeddings=trained,
        attention_factor=scaling.get("attention_factor"),
        mscale=scaling.get("mscale"),
        mscale_all_dim=scaling.get("mscale_all_dim"),
        truncate=bool(scaling.get("truncate", True)),
        **optional,
    )


def _theta(raw: dict[str, Any], scaling: dict[str, Any], default: float = 10000.0) -> float:
    return float(scaling.get("rope_theta") or raw.get("rope_theta") or default)


def _trained_positions(raw: dict[str, Any], scaling: dict[str, Any], max_positions: int) -> int:
    trained = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    return int(trained or max_positions)
