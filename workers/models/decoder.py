"""The decoder that Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi-3, Mixtral and Qwen3-MoE share. ModelConfig says
where they differ, and which layers have a mixture of experts in place of an MLP.

One forward pass takes a step's tokens of all sequences in one row [T, D]. The attention backend knows which tokens
belong together, and LoRABatch which adapter each of them uses. Under tensor parallelism each rank has its heads, and
its part of the MLP and of the vocabulary. x is the same on all ranks between layers.
"""

# T tokens · D hidden size · E this rank's heads of q, k and v in one row · H query heads · G KV heads · V vocabulary
# W this rank's part of the vocabulary

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.gated_mul import gated_mul
from lorafleet.kernels.decoder.rope_store import rotate_and_store
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache
from lorafleet.workers.bases.checkpoint import ModelConfig
from lorafleet.workers.models.layers import PackedLinear, ResidualNorm, RMSNorm
from lorafleet.workers.models.linear_weights import LinearWeights
from lorafleet.workers.models.rope import RotaryEmbedding
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.row_parallel_sum import RankSum
from lorafleet.workers.tp.shard import Shard


@dataclass(frozen=True, slots=True)
class StepContext:
    """The values of a step that every layer needs."""

    # One per layer: cos and sin, both [T, 1, F], for F pairs of a head's numbers.
    rotations: list[tuple[Tensor, Tensor]]
    slot_mapping_T: Tensor  # int64, block * block size + offset, where each token's key and value are written.
    caches: list[KVCache]  # One per layer.
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
        self.qkv_proj = PackedLinear(config.hidden_size, _slices(config, qkv), config.qkv_bias, dtype, device)
        self.o_proj = PackedLinear(
            config.q_size, (config.hidden_size,), config.o_bias, dtype, device, adds_bias=group.rank == 0
        )
        norm_dtype = config.norm_dtype(dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, norm_dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, norm_dtype, device) if config.qk_norm else None

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        cache = step.caches[self.layer]
        q_THD = rotate_and_store(
            self.qkv_proj(x_TD, step.lora),
            *step.rotations[self.layer],
            None if self.q_norm is None else self.q_norm.for_step(step.lora),
            None if self.k_norm is None else self.k_norm.for_step(step.lora),
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
        self.activation = config.activation
        self.gate_up_proj = PackedLinear(
            config.hidden_size, _slices(config, (inner, inner)), config.mlp_bias, dtype, device
        )
        self.down_proj = PackedLinear(
            inner, (config.hidden_size,), config.mlp_bias, dtype, device, adds_bias=group.rank == 0
        )

    def forward(self, x_TD: Tensor, lora: LoRABatch | None) -> LinearOutput:
        out: LinearOutput = self.down_proj(gated_mul(self.gate_up_proj(x_TD, lora), self.activation), lora)
        return out


def _slices(config: ModelConfig, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the slices of a packed linear as adapters see it. Fused projections share one A."""
    return (sum(sizes),) if config.fused_linears else sizes


class DecoderLayer(nn.Module):
    """One layer of the decoder. attention_out_norm and mlp_out_norm are applied to the branches before the residual is
    added. They are None if the model has none."""

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
        norm = config.hidden_size, config.rms_norm_eps, config.norm_dtype(dtype), device
        self.input_layernorm = ResidualNorm(*norm, ranks)
        self.self_attn = Attention(config, layer, group, dtype, device)
        self.attention_out_norm = RMSNorm(*norm) if config.branch_norms else None
        self.mlp_norm = ResidualNorm(*norm, ranks)
        experts = config.experts_of(layer)
        self.mlp: MLP | SparseMLP = (
            MLP(config, group, dtype, device)
            if experts is None
            else SparseMLP(config.hidden_size, experts, dtype, device)
        )
        self.mlp_out_norm = RMSNorm(*norm) if config.branch_norms else None

    def forward(self, x_TD: Tensor, residual_TD: Tensor, step: StepContext) -> LinearOutput:
        """Returns the MLP's output, not yet added to the residual. x is the input norm's output.

        The next layer's norm adds the output to the residual. In the same way the second norm here adds the
        attention's output, in place and in one launch.
        """
        attended = self.self_attn(x_TD, step)
        normed_TD = self.mlp_norm.add(attended, residual_TD, step.lora, self.attention_out_norm)
        out: LinearOutput = self.mlp(normed_TD, step.lora)
        return out

    def norms(self) -> dict[str, RMSNorm]:
        """Returns the norms by the names that checkpoints and adapters give them. In Gemma these names mean other
        norms."""
        found: dict[str, RMSNorm | None] = {
            "input_layernorm": self.input_layernorm,
            "self_attn.q_norm": self.self_attn.q_norm,
            "self_attn.k_norm": self.self_attn.k_norm,
        }
        if self.attention_out_norm is None:
            found["post_attention_layernorm"] = self.mlp_norm
        else:
            found["post_attention_layernorm"] = self.attention_out_norm
            found["pre_feedforward_layernorm"] = self.mlp_norm
            found["post_feedforward_layernorm"] = self.mlp_out_norm
        return {name: norm for name, norm in found.items() if norm is not None}


class DecoderModel(nn.Module):
    """The whole decoder on one rank. forward() returns the last norm's output for every token. logits() projects
    chosen rows to the vocabulary.

    config is the whole model's, and shard says what this rank holds. All ranks of the group make the same calls.
    """

    def __init__(self, config: ModelConfig, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        """Builds this rank's part. Raises ConfigError if the model cannot be divided among the group."""
        super().__init__()
        if config.quantization is not None and config.experts is not None:
            raise UnsupportedModel(
                "quantization of a mixture of experts is not supported. Leave quantization out, or serve the "
                "unquantized checkpoint.",
                "quantization",
            )
        self.config = config
        self.group = group
        self.shard = Shard.of(config, group.rank, group.size)
        local = self.shard.local
        self.embed_tokens = VocabTable(self.shard, group, dtype, device)
        ranks = RankSum(group, device)
        self.layers = nn.ModuleList(
            DecoderLayer(local, i, group, ranks, dtype, device) for i in range(config.num_layers)
        )
        norm_dtype = config.norm_dtype(dtype)
        self.norm = ResidualNorm(config.hidden_size, config.rms_norm_eps, norm_dtype, device, ranks)
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else VocabTable(self.shard, group, dtype, device)
        weights = LinearWeights(dtype, device)
        for names, linear in self.packed_linears():
            method = None if config.quantization is None else config.quantization.of(names)
            linear.weight = weights.empty(method, sum(linear.out_features), linear.in_features)
        self.rope = RotaryEmbedding(config.rope, device)
        self.sliding_rope = None if config.sliding_rope is None else RotaryEmbedding(config.sliding_rope, device)
        # rounded to the model's dtype
        self._embed_scale = torch.tensor(config.embed_scale, dtype=dtype).item()

    def forward(
        self,
        token_T: Tensor,
        position_T: Tensor,
        rope_length_T: Tensor,
        slot_mapping_T: Tensor,
        caches: list[KVCache],
        attention: AttentionBackend,
        lora: LoRABatch | None,
    ) -> Tensor:
        """Returns the last norm's output, [T, D]. `attention` must have planned this step.

        token_T, position_T and rope_length_T are int64 [T], the last as in RotaryEmbedding.cos_sin. slot_mapping_T and
        caches are as in StepContext.
        """
        if lora is not None:
            lora.begin()
        embedded_TD = self.embed_tokens.embed(token_T, lora)
        if self._embed_scale != 1.0:
            embedded_TD *= self._embed_scale
        rotations = self._rotations(position_T, rope_length_T, embedded_TD.dtype)
        step = StepContext(rotations, slot_mapping_T, caches, attention, lora)
        first, *later = [*(layer.input_layernorm for layer in self.decoder_layers()), self.norm]
        residual_TD, x_TD = first.start(embedded_TD, lora)
        for layer, next_norm in zip(self.decoder_layers(), later, strict=True):
            x_TD = next_norm.add(layer(x_TD, residual_TD, step), residual_TD, lora, layer.mlp_out_norm)
        return x_TD

    def _rotations(self, position_T: Tensor, rope_length_T: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        full = self.rope.cos_sin(position_T, rope_length_T, dtype)
        if self.sliding_rope is None:
            return [full] * self.config.num_layers
        sliding = self.sliding_rope.cos_sin(position_T, rope_length_T, dtype)
        return [full if window is None else sliding for window in self.config.sliding_windows]

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns this rank's columns, [T, W] in the model's dtype. They are -inf past the vocabulary's end."""
        return self.lm_head.logits(x_TD)

    def gather_logits(self, logits_TW: Tensor) -> Tensor:
        """Returns [T, V] on every rank, from what logits() returned on each."""
        return self.lm_head.gather(logits_TW)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.layers)

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        """Returns this rank's part of every packed linear with its projections' module paths, in layer order. For a
        mixture of experts, this includes the router only."""
        found: list[tuple[tuple[str, ...], PackedLinear]] = []
        qkv, gate_up = (("qkv",), ("gate_up",)) if self.config.fused_linears else (("q", "k", "v"), ("gate", "up"))
        for i, layer in enumerate(self.decoder_layers()):
            attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            found += [
                (tuple(f"{attn}.{p}_proj" for p in qkv), layer.self_attn.qkv_proj),
                ((f"{attn}.o_proj",), layer.self_attn.o_proj),
            ]
            if isinstance(layer.mlp, SparseMLP):
                found.append(((f"{mlp}.gate",), layer.mlp.gate))
                continue
            found += [
                (tuple(f"{mlp}.{p}_proj" for p in gate_up), layer.mlp.gate_up_proj),
                ((f"{mlp}.down_proj",), layer.mlp.down_proj),
            ]
        return found

    def mixtures(self) -> list[tuple[str, SparseMLP]]:
        """Returns this rank's part of every mixture of experts, with its experts' module path."""
        mlps = [(f"layers.{i}.mlp.experts", layer.mlp) for i, layer in enumerate(self.decoder_layers())]
        return [(name, mlp) for name, mlp in mlps if isinstance(mlp, SparseMLP)]

    def norms(self) -> list[tuple[str, RMSNorm]]:
        """Returns every norm with its module path."""
        found = [
            (f"layers.{i}.{name}", norm)
            for i, layer in enumerate(self.decoder_layers())
            for name, norm in layer.norms().items()
        ]
        return [*found, ("norm", self.norm)]
