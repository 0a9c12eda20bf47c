"""Computes rotary position embeddings with the scalings in use: none, linear, dynamic NTK, llama3, yarn, longrope.

The formulas are those of transformers' rope utilities, with which the checkpoints were trained. Sources: RoFormer,
arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; dynamic NTK scaling and linear interpolation as
published by their authors.
"""

# T tokens · F frequencies, half of the numbers of a head that are rotated

from __future__ import annotations

import math

import torch
from torch import Tensor

from lorafleet.workers.bases.rope_config import RopeConfig


class RotaryEmbedding:
    """Computes cos and sin of each token's angles. kernels/decoder/rope_store.py rotates by them."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self.config = config
        self.inv_freq_F = _inverse_frequencies(config).to(device)
        self.long_inv_freq_F = _long(config, config.long_factor).to(device) if config.long_factor else None
        self.attention_scaling = _attention_scaling(config)
        self._powers_F = _powers(config).to(device)

    def cos_sin(self, position_T: Tensor, length_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, both [T, 1, F], to be applied to the first 2 F numbers of each head.

        length_T (int64) matters in scalings that depend on it. It is the length of the sequence at the time when
        transformers would have computed the token: the prompt's for prompt tokens, and its own position + 1 for
        generated ones.
        """
        angle_TF = position_T.to(torch.float32).unsqueeze(1) * self._frequencies(length_T)
        cos, sin = angle_TF.cos(), angle_TF.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)

    def _frequencies(self, length_T: Tensor) -> Tensor:
        """Returns the frequencies as [F], or as [T, F] if they depend on the length."""
        if self.config.rope_type == "dynamic":
            return self._dynamic_frequencies(length_T)
        if self.long_inv_freq_F is not None:
            is_long_T1 = (length_T > self.config.original_max_position_embeddings).unsqueeze(1)
            return torch.where(is_long_T1, self.long_inv_freq_F, self.inv_freq_F)
        return self.inv_freq_F

    def _dynamic_frequencies(self, length_T: Tensor) -> Tensor:
        """Returns the frequencies [T, F]. theta grows with the length once that exceeds the trained maximum."""
        config, trained = self.config, self.config.max_position_embeddings
        length_T1 = length_T.clamp(min=trained).to(torch.float32).unsqueeze(1)
        growth = config.factor * length_T1 / trained - (config.factor - 1)
        theta = config.theta * growth ** (config.rotary_dim / (config.rotary_dim - 2))
        return 1.0 / theta**self._powers_F


def _powers(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim


def _inverse_frequencies(config: RopeConfig) -> Tensor:
    plain = 1.0 / config.theta ** _powers(config)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, plain)
    if config.rope_type == "yarn":
        return _yarn(config, plain)
    if config.rope_type == "longrope":
        return _long(config, config.short_factor)
    return plain


def _long(config: RopeConfig, factor: tuple[float, ...]) -> Tensor:
    return 1.0 / (torch.tensor(factor, dtype=torch.float32) * config.theta ** _powers(config))


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    trained = config.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (trained / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - smooth) * plain / config.factor + smooth * plain
    scaled = torch.where(wavelength > trained / config.low_freq_factor, plain / config.factor, blended)
    return torch.where(wavelength < trained / config.high_freq_factor, plain, scaled)


def _yarn(config: RopeConfig, plain: Tensor) -> Tensor:
    trained, dim = config.original_max_position_embeddings, config.rotary_dim

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
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.rope_type == "longrope":
        grown = math.log(config.factor) / math.log(config.original_max_position_embeddings)
        return math.sqrt(1 + grown) if config.factor > 1 else 1.0

    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
