"""The attention of one decoder layer: its linears, the norms of q and k, the rotation, and the paged attention."""

# T tokens · D hidden size · E this rank's heads of q, k and v in one row · H query heads · P head size
# L layers · p this rank's part of a per-layer embedding

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.head_gate import head_gate
from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.decoder.rope_store import rotate_and_store
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache
from lorafleet.workers.bases.layer_config import AttentionConfig, QueryTemperature
from lorafleet.workers.bases.model_config import NormStyle
from lorafleet.workers.device.state_cache import StepStates
from lorafleet.workers.models.layers import Norm, PackedLinear, parameter
from lorafleet.workers.models.row_norm import RowNorm
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard


@dataclass(frozen=True, slots=True)
class StepContext:
    """The values of a step that every layer needs."""

    # One per layer that has attention: cos and sin, both [T, 1, F], for F pairs of a head's numbers.
    rotations: list[tuple[Tensor, Tensor]]
    position_T: Tensor  # int64
    slot_mapping_T: Tensor  # int64, block * block size + offset, where each token's key and value are written.
    caches: list[KVCache]  # One per layer that has attention.
    attention: AttentionBackend
    lora: LoRABatch | None
    per_layer_TLp: Tensor | None = None  # This rank's part of each token's vector for every layer.
    states: StepStates | None = None  # None if the model has no recurrent layers.


class Attention(nn.Module):
    def __init__(self, shard: Shard, layer: int, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, config = shard.local, shard.local.layers[layer].attention
        whole = shard.whole.layers[layer].attention
        assert isinstance(config, AttentionConfig) and isinstance(whole, AttentionConfig)
        self.index = model.attention_layers.index(layer)  # among the layers that have attention
        self.config = config
        qkv, [o] = config.packed(model.hidden_size)
        self.qkv_proj = PackedLinear.of(qkv, dtype, device)
        self.o_proj = PackedLinear.of([o], dtype, device, adds_bias=group.rank == 0)
        self.sinks = parameter(config.num_heads, dtype=dtype, device=device) if config.has_sinks else None
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self.row_norm: RowNorm | None = None
        self._eps = model.norm.eps
        if config.qk_norm is not None:
            style, norm_dtype = NormStyle(model.norm.eps, adds_one=model.norm.adds_one), model.norm_dtype(dtype)
            if config.qk_norm == "row":
                self.row_norm = RowNorm(config, whole, style, group, norm_dtype, device)
                self.q_norm, self.k_norm = self.row_norm.q_norm, self.row_norm.k_norm
            else:
                self.q_norm = Norm(config.head_dim, style, norm_dtype, device)
                if config.cache_layer is None:
                    self.k_norm = Norm(config.head_dim, style, norm_dtype, device)
                if config.qk_norm_names is None:
                    for norm in (self.q_norm, self.k_norm):
                        if norm is not None:
                            norm.weight.fill_(1.0)

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        cache = step.caches[self.index]
        qkv = self.qkv_proj(x_TD, step.lora)
        if self.row_norm is not None:
            qkv = self.row_norm(qkv, step.lora)
        q_norm, k_norm = self._head_norms(step.lora)
        q_THP = rotate_and_store(
            qkv,
            *step.rotations[self.index],
            q_norm,
            k_norm,
            cache.k_NPGD,
            cache.v_NPGD,
            step.slot_mapping_T,
            self._eps,
            cache.k_scale,
            cache.v_scale,
            norms_rotated=self.config.qk_norm == "head_after",
            is_interleaved=self.config.rope is not None and self.config.rope.is_interleaved,
            row_heads=self.config.row_heads,
            norms_values=self.config.value_norm,
        )
        if self.config.temperature is not None:
            q_THP = q_THP * temperature(self.config.temperature, step.position_T).to(q_THP.dtype)[:, None, None]
        attended = step.attention.attend(self.index, q_THP)
        if self.config.has_output_gate:
            attended = head_gate(attended.contiguous(), qkv)
        out: LinearOutput = self.o_proj(attended.reshape(x_TD.shape[0], -1), step.lora)
        return out

    def norms(self) -> dict[str, Norm]:
        """Returns the norms by their module paths below the layer."""
        if self.config.qk_norm_names is None:
            return {}
        found = zip(self.config.qk_norm_names, (self.q_norm, self.k_norm), strict=True)
        return {name: norm for name, norm in found if norm is not None}

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of AttentionConfig.packed."""
        return [self.qkv_proj, self.o_proj]

    def _head_norms(self, lora: LoRABatch | None) -> tuple[NormWeight | None, NormWeight | None]:
        if self.row_norm is not None or self.q_norm is None:
            return None, None
        return self.q_norm.for_step(lora), None if self.k_norm is None else self.k_norm.for_step(lora)


def temperature(config: QueryTemperature, position_T: Tensor) -> Tensor:
    """Returns the factor of each token's query, float32 [T]."""
    steps_T = torch.floor((position_T.float() + config.offset) / config.period)
    return 1 + config.scale * torch.log1p(steps_T)
