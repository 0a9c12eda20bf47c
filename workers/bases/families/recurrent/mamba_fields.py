"""Reads from a config.json what families with Mamba-2 layers have in common. Most name its settings mamba_*."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.recurrence_config import Mamba2Config

# transformers 5's names of the kinds of layers, and older ones.
ATTENTION, RECURRENT = "full_attention", "linear_attention"
OLDER_KINDS = {"attention": ATTENTION, "mamba": RECURRENT, "multi": ATTENTION}


def mamba_layer(fields: ConfigFields, inner_size: int) -> Mamba2Config:
    """Returns the Mamba-2 layer of a family that names the settings mamba_*. inner_size is that of all heads.

    Raises ConfigError if the sizes contradict each other.
    """
    if fields.activation() != "silu":
        raise UnsupportedModel(f"hidden_act={fields.raw['hidden_act']!r} is not supported; only silu is.")
    num_heads = fields.integer("mamba_n_heads", 128)
    own = fields.raw.get("mamba_d_head", "auto")
    head_dim = inner_size // num_heads if own in (None, "auto") else fields.integer("mamba_d_head", 64)
    if head_dim * num_heads != inner_size:
        raise ConfigError(
            f"config.json has mamba_n_heads={num_heads} of {head_dim} numbers, but {inner_size} numbers in all. "
            "Correct the file.",
            "model",
        )
    return checked_mamba(
        Mamba2Config(
            num_heads=num_heads,
            head_dim=head_dim,
            num_groups=fields.integer("mamba_n_groups", 1),
            state_size=fields.integer("mamba_d_state", 256),
            conv_size=fields.integer("mamba_d_conv", 4),
            conv_bias=fields.flag("mamba_conv_bias", True),
            in_bias=fields.flag("mamba_proj_bias"),
            out_bias=fields.flag("mamba_proj_bias"),
            dt_limits=dt_limits(fields),
        )
    )


def checked_mamba(mamba: Mamba2Config) -> Mamba2Config:
    """Returns the layer, or raises an error for sizes that are not served."""
    if mamba.num_heads % mamba.num_groups:
        raise ConfigError(
            f"config.json has {mamba.num_heads} Mamba heads, which is not a multiple of its {mamba.num_groups} groups.",
            "model",
        )
    if mamba.conv_size < 2:
        raise UnsupportedModel("a Mamba convolution of 1 token is not supported; it must have 2 or more.")
    return mamba


def dt_limits(fields: ConfigFields) -> tuple[float, float]:
    """Returns the limits of each head's step."""
    given = fields.raw.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
        low, high = (_number(value) for value in given)
        if low is not None and high is not None and 0 <= low <= high:
            return low, high
    raise ConfigError(f"config.json has time_step_limit={given!r}; it must be two ascending numbers.", "model")


def _number(value: object) -> float | None:
    """Returns the number, or None if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def layer_kinds(fields: ConfigFields, given: object, default: Sequence[str]) -> list[str]:
    """Returns the kind of each layer by its newest name.

    Raises UnsupportedModel for an unknown one, and if no layer has attention.
    """
    named = [str(kind) for kind in given] if isinstance(given, list) else default
    kinds = [OLDER_KINDS.get(kind, kind) for kind in named]
    if set(kinds) - {ATTENTION, RECURRENT} or len(kinds) != fields.num_layers:
        raise UnsupportedModel(f"layer types {sorted(set(kinds))} over {len(kinds)} layers are not supported.")
    require_attention(kinds)
    return kinds


def require_attention(kinds: Sequence[str]) -> None:
    """Raises UnsupportedModel if no layer has attention."""
    if ATTENTION not in kinds:
        raise UnsupportedModel("layers without any attention are not supported; at least one layer must have it.")
