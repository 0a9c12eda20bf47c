"""Computes rotary position embeddings with the scalings in use: none, linear, dynamic NTK, llama3, yarn, longrope,
proportional.

The formulas are those of transformers' rope utilities, with which the checkpoints were trained. Sources: RoFormer,
arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; dynamic NTK scaling and linear interpolation as
published by their authors.
"""

# T tokens · F frequencies, half of the numbers of a head that are rotated · S 1 + slots · C 1 + F columns

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.bases.rope_config import RopeConfig


class Rotations:
    """The ropes of all layers, each computed once a step. Adapters may replace one of them for their own tokens."""

    def __init__(
        self, ropes: Sequence[RopeConfig | None], device: torch.device, replaced: RopeConfig | None = None
    ) -> None:
        """`ropes` has one for each layer. None: the layer rotates nothing. `replaced` is the rope that adapters may
        replace."""
        distinct = list(dict.fromkeys(ropes))
        # By layer, the place of its rope among the distinct ones. To hash a rope takes longer than to find its place.
        self._place_of_layer = [distinct.index(rope) for rope in ropes]
        self._embeddings = [None if rope is None else RotaryEmbedding(rope, device) for rope in distinct]
        self._replaced = None if replaced is None else self._embeddings[distinct.index(replaced)]
        self._slots: SlotRopes | None = None

    def add_slots(self, max_loras: int) -> SlotRopes | None:
        """Makes room for the slots' own ropes. Returns None if adapters cannot have one."""
        if self._replaced is not None:
            self._slots = SlotRopes(self._replaced, max_loras)
        return self._slots

    def of_step(
        self, position_T: Tensor, length_T: Tensor, dtype: torch.dtype, lora: LoRABatch | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns cos and sin for each layer. The arguments and results are those of RotaryEmbedding.cos_sin."""
        found: list[tuple[Tensor, Tensor]] = []
        for embedding in self._embeddings:
            if embedding is None:
                nothing = torch.empty(len(position_T), 1, 0, dtype=dtype, device=position_T.device)
                found.append((nothing, nothing))
            elif embedding is self._replaced and self._slots is not None and lora is not None and lora.has_ropes:
                found.append(self._slots.cos_sin(position_T, lora.plan.slot_T, dtype))
            else:
                found.append(embedding.cos_sin(position_T, length_T, dtype))
        return [found[place] for place in self._place_of_layer]


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

    def static(self) -> tuple[Tensor, float]:
        """Returns the frequencies [F] and the factor of cos and sin, which must not depend on the length."""
        assert not self.config.depends_on_length
        return self.inv_freq_F, self.attention_scaling

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


class SlotRopes:
    """The angles of the adapters in slots, in device memory that never moves, so that CUDA graphs can read it."""

    def __init__(self, base: RotaryEmbedding, max_loras: int) -> None:
        """`base` is the rope of base tokens, and of adapters that have none of their own."""
        self._base = base.config
        frequency_F, scaling = base.static()
        # Row 0 is the base's, row 1 + s slot s's. The last column is the factor of cos and sin.
        row_C = torch.cat([frequency_F, frequency_F.new_tensor([scaling])])
        self._table_SC = row_C.repeat(1 + max_loras, 1)
        self._own: set[int] = set()  # slots whose row is not the base's

    def write_slot(self, slot: int, rope: RopeConfig | None) -> None:
        """Writes the slot's row on the current stream; the host does not wait. None means the base's rope.

        This costs nothing if the slot's previous adapter had none of its own either.
        """
        if rope is None and slot not in self._own:
            return
        frequency_F, scaling = RotaryEmbedding(self._base if rope is None else rope, torch.device("cpu")).static()
        row_C = torch.cat([frequency_F, frequency_F.new_tensor([scaling])])
        if self._table_SC.is_cuda:
            row_C = row_C.pin_memory()
        self._table_SC[1 + slot].copy_(row_C, non_blocking=True)
        self._own.discard(slot)
        if rope is not None:
            self._own.add(slot)

    def cos_sin(self, position_T: Tensor, slot_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns what RotaryEmbedding.cos_sin does, for tokens of these slots. slot_T is int32, -1 for the base."""
        row_TC = self._table_SC[slot_T + 1]
        angle_TF = position_T.to(torch.float32).unsqueeze(1) * row_TC[:, :-1]
        scaling_T1 = row_TC[:, -1:]
        cos, sin = angle_TF.cos() * scaling_T1, angle_TF.sin() * scaling_T1
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


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
    if config.rope_type == "proportional":
        turns_F = torch.arange(len(plain)) < config.turning_pairs
        return torch.where(turns_F, plain / config.factor, 0.0)
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
