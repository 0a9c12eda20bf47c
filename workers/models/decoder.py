"""The decoder that Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE share; ModelConfig says where they differ, and
which layers have a mixture of experts in the place of an MLP.

One forward pass takes a step's tokens of all sequences in one row [T, D]; which belong together is the attention
backend's affair, which adapter each uses is LoRABatch's. Under tensor parallelism each rank has its heads, its part of
the MLP and of the vocabulary; x is the same on all ranks between layers.
"""

# T tokens · D hidden size · E this rank's heads of q, k and v in one row · H query heads · G KV heads · V vocabulary
# W this rank's part of the vocabulary

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from lorafleet.kernels.gated_mul import gated_mul
from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.rope_store import rotate_and_store
from lorafleet.workers.attention.base import AttentionBackend, KVCache
from lorafleet.workers.checkpoint import ModelConfig
from lorafleet.workers.models.layers import LinearOutput, PackedLinear, ResidualNorm, RMSNorm
from lorafleet.workers.models.moe import SparseMLP
from lorafleet.workers.models.rope import RotaryEmbedding
from lorafleet.workers.models.vocabulary import VocabTable
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.rank_sum import RankSum
from lorafleet.workers.tp.shard import Shard


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer needs of a step.

    cos and sin are [T, 1, head size / 2]. caches: one a layer. slot_mapping_T: int64, block * block size + offset,
    where each token's key and value are written.
    """

    cos: Tensor
    sin: Tensor
    slot_mapping_T: Tensor
    caches: list[KVCache]
    attention: AttentionBackend
    lora: LoRABatch | None


class Attention(nn.Module):
    def __init__(
        self, config: ModelConfig, layer: int, group: TPGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.layer = layer
        self.eps = config.rms_norm_eps
        qkv = (config.q_size, config.kv_size, config.kv_size)
        self.qkv_proj = PackedLinear(config.hidden_size, qkv, config.qkv_bias, dtype, device)
        self.o_proj = PackedLinear(
            config.q_size, (config.hidden_size,), config.o_bias, dtype, device, adds_bias=group.rank == 0
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        cache = step.caches[self.layer]
        qkv_TE, delta_TE = self.qkv_proj(x_TD, step.lora)
        q_THD = rotate_and_store(
            qkv_TE,
            delta_TE,
            step.cos,
            step.sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            cache.k_NPGD,
            cache.v_NPGD,
            step.slot_mapping_T,
            self.eps,
            cache.k_scale,
            cache.v_scale,
        )
        attended = step.attention.attend(self.layer, q_THD)
        out: LinearOutput = self.o_proj(attended.reshape(x_TD.shape[0], -1), step.lora)
        return out


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = PackedLinear(config.hidden_size, (inner, inner), config.mlp_bias, dtype, device)
        self.down_proj = PackedLinear(
            inner, (config.hidden_size,), config.mlp_bias, dtype, device, adds_bias=group.rank == 0
        )

    def forward(self, x_TD: Tensor, lora: LoRABatch | None) -> LinearOutput:
        out: LinearOutput = self.down_proj(gated_mul(*self.gate_up_proj(x_TD, lora)), lora)
        return out


class DecoderLayer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        group: TPGroup,
        ranks: RankSum,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.input_layernorm = ResidualNorm(config.hidden_size, config.rms_norm_eps, dtype, device, ranks)
        self.self_attn = Attention(config, layer, group, dtype, device)
        self.post_attention_layernorm = ResidualNorm(config.hidden_size, config.rms_norm_eps, dtype, device, ranks)
        experts = config.experts_of(layer)
        self.mlp: MLP | SparseMLP = (
            MLP(config, group, dtype, device)
            if experts is None
            else SparseMLP(config.hidden_size, experts, dtype, device)
        )

    def forward(self, x_TD: Tensor, residual_TD: Tensor, step: StepContext) -> LinearOutput:
        """x is the input norm's output. Returns the MLP's, not yet added to the residual: the next layer's norm does
        that, as here the second norm adds what attention gives, in place and in one launch.
        """
        attended = self.self_attn(x_TD, step)
        out: LinearOutput = self.mlp(self.post_attention_layernorm.add(attended, residual_TD), step.lora)
        return out


class DecoderModel(nn.Module):
    """forward() gives the last norm's output for every token; logits() projects chosen rows to the vocabulary.

    config is the whole model's, shard says what this rank holds. All ranks of the group make the same calls.
    """

    def __init__(self, config: ModelConfig, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError where the model cannot be divided among the group."""
        super().__init__()
        self.config = config
        self.group = group
        self.shard = Shard.of(config, group.rank, group.size)
        local = self.shard.local
        self.embed_tokens = VocabTable(self.shard, group, dtype, device)
        ranks = RankSum(group, device)
        self.layers = nn.ModuleList(
            DecoderLayer(local, i, group, ranks, dtype, device) for i in range(config.num_layers)
        )
        self.norm = ResidualNorm(config.hidden_size, config.rms_norm_eps, dtype, device, ranks)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else VocabTable(self.shard, group, dtype, device)
        self.rope = RotaryEmbedding(config.rope, device)

    def forward(
        self,
        token_T: Tensor,
        position_T: Tensor,
        rope_length_T: Tensor | None,
        slot_mapping_T: Tensor,
        caches: list[KVCache],
        attention: AttentionBackend,
        lora: LoRABatch | None,
    ) -> Tensor:
        """token_T, position_T: int64 [T]; rope_length_T as in RotaryEmbedding.cos_sin. Returns [T, D].

        slot_mapping_T and caches as in StepContext; attention has planned this step.
        """
        if lora is not None:
            lora.begin()
        embedded_TD = self.embed_tokens.embed(token_T)
        cos, sin = self.rope.cos_sin(position_T, rope_length_T, embedded_TD.dtype)
        step = StepContext(cos, sin, slot_mapping_T, caches, attention, lora)
        first, *later = [*(layer.input_layernorm for layer in self.decoder_layers()), self.norm]
        residual_TD, x_TD = first.start(embedded_TD)
        for layer, next_norm in zip(self.decoder_layers(), later, strict=True):
            x_TD = next_norm.add(layer(x_TD, residual_TD, step), residual_TD)
        return x_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, W] in the model's dtype: this rank's columns, -inf past the vocabulary's end."""
        return self.lm_head.logits(x_TD)

    def gather_logits(self, logits_TW: Tensor) -> Tensor:
        """[T, V] on every rank, from what logits() gave each."""
        return self.lm_head.gather(logits_TW)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.layers)

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        """Every packed linear, this rank's part, with its projections' module paths, in layer order. Of a mixture of
        experts the router."""
        found: list[tuple[tuple[str, ...], PackedLinear]] = []
        for i, layer in enumerate(self.decoder_layers()):
            attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            found += [
                (tuple(f"{attn}.{p}_proj" for p in "qkv"), layer.self_attn.qkv_proj),
                ((f"{attn}.o_proj",), layer.self_attn.o_proj),
            ]
            if isinstance(layer.mlp, SparseMLP):
                found.append(((f"{mlp}.gate",), layer.mlp.gate))
                continue
            found += [
                ((f"{mlp}.gate_proj", f"{mlp}.up_proj"), layer.mlp.gate_up_proj),
                ((f"{mlp}.down_proj",), layer.mlp.down_proj),
            ]
        return found
