"""Rotary position embedding with the scalings in use: none, linear, dynamic NTK, llama3, yarn.

Formulas as in transformers' rope utilities, which the checkpoints were trained with. Sources: RoFormer, arXiv
2104.09864; YaRN, arXiv 2309.00071; dynamic NTK scaling and linear interpolation as published by their authors.
"""

# T tokens · F = head size / 2 frequencies

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """rope_type "default" uses theta and head_dim alone; the other fields are each scaling's own."""

    head_dim: int
    theta: float
    max_position_embeddings: int
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def depends_on_length(self) -> bool:
        """Dynamic NTK past the trained length: a token's angles depend on how long its sequence is."""
        return self.rope_type == "dynamic"


class RotaryEmbedding:
    """cos and sin of each token's angles; kernels/rope_store.py rotates by them."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        self.inv_freq_F = _inverse_frequencies(config).to(device)
        self.attention_scaling = _attention_scaling(config)

    def cos_sin(self, position_T: Tensor, length_T: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [T, 1, F], to be applied to the two halves of each head.

        length_T (int64) is needed by dynamic scaling only: the length of the sequence at the time transformers would
        have computed the token, the prompt's for prompt tokens and its own position + 1 for generated ones.
        """
        inv_freq = self.inv_freq_F
        if self.config.depends_on_length and length_T is not None:
            inv_freq = _dynamic_frequencies(self.config, length_T)
        angle_TF = position_T.to(torch.float32).unsqueeze(1) * inv_freq
        cos, sin = angle_TF.cos(), angle_TF.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def _powers(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim


def _inverse_frequencies(config: RopeConfig) -> Tensor:
    plain = 1.0 / config.theta ** _powers(config)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, plain)
    if config.rope_type == "yarn":
        return _yarn(config, plain)
    return plain


def _dynamic_frequencies(config: RopeConfig, length_T: Tensor) -> Tensor:
    """[T, F]: theta grows with the length once that passes the trained maximum."""
    trained = config.max_position_embeddings
    length_T1 = length_T.clamp(min=trained).to(torch.float32).unsqueeze(1)
    growth = config.factor * length_T1 / trained - (config.factor - 1)
    theta = config.theta * growth ** (config.head_dim / (config.head_dim - 2))
    return 1.0 / theta ** _powers(config).to(length_T.device)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    trained = config.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (trained / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = torch.where(wavelength > trained / config.low_freq_factor, plain / config.factor, blended)
    return torch.where(wavelength < trained / config.high_freq_factor, plain, scaled)


def _yarn(config: RopeConfig, plain: Tensor) -> Tensor:
    trained, dim = config.original_max_position_embeddings, config.head_dim

    def dimension_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)


def _attention_scaling(config: RopeConfig) -> float:
    if config.rope_type != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
