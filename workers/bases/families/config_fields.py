"""Reads a config.json for the families: values with defaults and bounds, and the pieces that most families share.

transformers' newer spellings are read beside the older ones. A value of the wrong type is a ConfigError that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lorafleet.kernels.decoder.gated_mul import Activation
from lorafleet.kernels.moe.expert_activation import ExpertActivation
from lorafleet.protocol.config_json import integer
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.layer_config import AttentionConfig, LayerConfig, MLPConfig
from lorafleet.workers.bases.model_config import ModelConfig, NormStyle
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.rope_parameters import read_rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
MAX_LAYERS = 4096  # released models have up to 160; lists of this many are made before the tensors are counted
MAX_MTP_LAYERS = 64  # layers that predict further tokens; released models have 1 to 3
WINDOWED = "sliding_attention"


class ConfigFields:
    """The values of one config.json, with the family's defaults for what it leaves out."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.raw: dict[str, Any] = {**defaults, **raw}

    def integer(self, key: str, default: int) -> int:
        """Returns a positive integer."""
        return integer(self.raw, key, default)

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ConfigError(f"config.json has {key}={value!r}; it must be a number.", "model")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or value not in (0, 1):
            raise ConfigError(f"config.json has {key}={value!r}; it must be true or false.", "model")
        return bool(value)

    def refuse(self, key: str, *served: object) -> None:
        """Raises UnsupportedModel if the option is set to another value than those in `served`."""
        value = self.raw.get(key)
        if value is not None and value not in served:
            raise UnsupportedModel(f"{key}={value!r} is not supported; only {', '.join(map(str, served))} is.")

    @property
    def num_layers(self) -> int:
        count = self.integer("num_hidden_layers", 32)
        if count > MAX_LAYERS:
            raise ConfigError(
                f"config.json has num_hidden_layers={count}; it must be at most {MAX_LAYERS}. Correct the file.",
                "model",
            )
        return count

    @property
    def hidden_size(self) -> int:
        return self.integer("hidden_size", 4096)

    def mtp_layers(self, default: int) -> tuple[str, ...]:
        """Returns the beginnings of the names of layers behind the last, which predict further tokens.

        `default` is the family's number of such layers.
        """
        count = self.num_mtp_layers("num_nextn_predict_layers", default)
        return tuple(f"model.layers.{self.num_layers + i}." for i in range(count))

    def num_mtp_layers(self, key: str, default: int) -> int:
        """Returns the number of layers that predict further tokens, which config.json has under this key."""
        count = self.raw.get(key)
        count = default if count is None else count
        if type(count) is not int or not 0 <= count <= MAX_MTP_LAYERS:
            raise ConfigError(
                f"config.json has {key}={count!r}; it must be an integer of at most {MAX_MTP_LAYERS}.", "model"
            )
        return count

    def max_positions(self, default: int) -> int:
        return self.integer("max_position_embeddings", default)

    def activation(self) -> Activation:
        """Returns the activation of the MLPs. Gemma's configs have two keys for it, of which the first one counts."""
        name = str(self.raw.get("hidden_activation") or self.raw.get("hidden_act") or "silu")
        if name not in ACTIVATIONS:
            raise UnsupportedModel(f"hidden_act={name!r} is not supported; only {', '.join(ACTIVATIONS)} are.")
        return ACTIVATIONS[name]

    def expert_activation(self) -> ExpertActivation:
        """Returns the experts' activation. Raises UnsupportedModel for another one than silu."""
        if self.activation() != "silu":
            raise UnsupportedModel(f"hidden_act={self.raw['hidden_act']!r} is not supported for experts; only silu is.")
        return "silu"

    def attention(
        self, rope: RopeConfig | None, *, kv_heads: int | None = None, head_dim: int | None = None
    ) -> AttentionConfig:
        """Returns the attention with its heads and nothing else. kv_heads and head_dim are the family's defaults."""
        num_heads = self.num_heads
        given = self.raw.get("num_key_value_heads", kv_heads)
        num_kv_heads = num_heads if given is None else integer({"num_key_value_heads": given}, "num_key_value_heads", 1)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}."
            )
        size = self.head_dim(head_dim)
        return AttentionConfig(num_heads, num_kv_heads, size, size**-0.5, rope)

    @property
    def num_heads(self) -> int:
        return self.integer("num_attention_heads", 32)

    def head_dim(self, default: int | None = None) -> int:
        if self.raw.get("head_dim"):
            return self.integer("head_dim", 0)
        return default or self.hidden_size // self.num_heads

    def rope(
        self,
        default_positions: int,
        *,
        theta: float = 10000.0,
        head_dim: int | None = None,
        layer_type: str | None = None,
        partial: float | None = None,
        is_interleaved: bool = False,
    ) -> RopeConfig:
        """Returns the rope of all layers, or of those of one type if config.json has one for each type.

        Args:
            head_dim: The family's default.
            partial: The family's default of partial_rotary_factor; None if the family rotates whole heads only.
        """
        found = read_rope(
            self.raw, self.head_dim(head_dim), self.max_positions(default_positions), theta, layer_type, partial
        )
        return replace(found, is_interleaved=is_interleaved)

    def mlp(self, default: int = 11008, *, has_bias: bool = False) -> MLPConfig:
        return MLPConfig(self.integer("intermediate_size", default), self.activation(), has_bias)

    def layer_types(
        self, default: Callable[[int], str], served: Sequence[str] = ("full_attention", WINDOWED)
    ) -> list[str]:
        """Returns the type of each layer. Without layer_types in config.json, `default` says it."""
        kinds = self.raw.get("layer_types") or [default(i) for i in range(self.num_layers)]
        if set(kinds) - set(served) or len(kinds) != self.num_layers:
            raise UnsupportedModel(f"layer_types {sorted(set(kinds))} over {len(kinds)} layers is not supported.")
        return list(kinds)

    def equal_layers(self, layer: LayerConfig) -> tuple[LayerConfig, ...]:
        return (layer,) * self.num_layers

    def windowed_layers(self, layer: LayerConfig, windows: Sequence[int | None]) -> tuple[LayerConfig, ...]:
        """Returns layers that differ in their windows alone."""
        attention = layer.attention
        assert isinstance(attention, AttentionConfig)
        return tuple(replace(layer, mixer=replace(attention, window=window)) for window in windows)

    def model(
        self,
        layers: tuple[LayerConfig, ...],
        default_positions: int,
        *,
        eps: float = 1e-6,
        eps_key: str = "rms_norm_eps",
    ) -> ModelConfig:
        """Returns the model with these layers. Families replace in it what they do differently."""
        return ModelConfig(
            architecture=self.raw["architectures"][0],
            vocab_size=self.integer("vocab_size", 32000),
            hidden_size=self.hidden_size,
            layers=layers,
            norm=NormStyle(self.number(eps_key, eps)),
            max_position_embeddings=self.max_positions(default_positions),
            tie_word_embeddings=self.flag("tie_word_embeddings"),
            dtype=self._dtype(),
        )

    def _dtype(self) -> torch.dtype | None:
        name = self.raw.get("dtype") or self.raw.get("torch_dtype")
        if name is None:
            return None
        if name not in DTYPES:
            raise UnsupportedModel(f"config.json's dtype {name!r} is not supported; only {', '.join(DTYPES)} are.")
        return DTYPES[name]
