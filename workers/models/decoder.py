"""The decoder that all families share. ModelConfig says what its layers consist of.

One forward pass takes a step's tokens of all sequences in one row [T, D]. The attention backend knows which tokens
belong together, and LoRABatch which adapter each of them uses. Under tensor parallelism each rank has its heads, and
its part of the MLP and of the vocabulary. x is the same on all ranks between layers.
"""

# T tokens · D hidden size · N residual streams · V vocabulary · W this rank's part of the vocabulary

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.per_layer_config import PROJECTION_NORM, TABLE
from lorafleet.workers.device.state_cache import StepStates
from lorafleet.workers.models.alternating_updates import Streams
from lorafleet.workers.models.attention import Attention, StepContext
from lorafleet.workers.models.decoder_layer import DecoderLayer
from lorafleet.workers.models.delta_net import DeltaNet
from lorafleet.workers.models.feature_taps import FeatureTaps
from lorafleet.workers.models.layers import Norm, PackedLinear, ResidualSum
from lorafleet.workers.models.linear_weights import LinearWeights, hold_weights
from lorafleet.workers.models.mamba2 import Mamba2, ParallelMixer
from lorafleet.workers.models.mlp import MLP
from lorafleet.workers.models.per_layer_embedding import PerLayerEmbedding
from lorafleet.workers.models.rope import Rotations
from lorafleet.workers.models.short_conv import ShortConv
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.row_parallel_sum import RankSum
from lorafleet.workers.tp.shard import Shard


class DecoderModel(nn.Module):
    """The whole decoder on one rank. forward() returns the last norm's output for every token. logits() projects
    chosen rows to the vocabulary.

    config is the whole model's, and shard says what this rank holds. All ranks of the group make the same calls.
    """

    def __init__(self, config: ModelConfig, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        """Builds this rank's part. Raises ConfigError if the model cannot be divided among the group."""
        super().__init__()
        self.config = config
        self.group = group
        self.shard = Shard.of(config, group.rank, group.size)
        self.embed_tokens = VocabTable(self.shard, group, dtype, device)
        self.ranks = RankSum(group, device)
        self.layers = nn.ModuleList(
            DecoderLayer(self.shard, i, group, self.ranks, dtype, device) for i in range(config.num_layers)
        )
        self.norm = Norm(config.hidden_size, config.norm, config.norm_dtype(dtype), device)
        self._last = ResidualSum(self.norm, config.residual_scale, config.norm.eps, self.ranks)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else VocabTable(self.shard, group, dtype, device, has_bias=config.head_bias)
        )
        self.per_layer: PerLayerEmbedding | None = None
        if config.per_layer is not None:
            self.per_layer = PerLayerEmbedding(config, config.per_layer, group, dtype, device)
        self.taps: FeatureTaps | None = None  # Set while a head drafts from the hidden states.
        self.streams = None if config.altup is None else Streams(config, config.altup, dtype, device)
        hold_weights(config, self.packed_linears(), self.mixtures(), LinearWeights(dtype, device))
        ropes = [attention.rope for attention in config.attentions]
        self.rotations = Rotations(ropes, device, config.adapters_rope)
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
        states: StepStates | None = None,
    ) -> Tensor:
        """Returns the last norm's output, [T, D]. `attention` must have planned this step.

        token_T, position_T and rope_length_T are int64 [T], the last as in RotaryEmbedding.cos_sin. slot_mapping_T,
        caches and states are as in StepContext.
        """
        if lora is not None:
            lora.begin()
        embedded_TD = self.embed_tokens.embed(token_T, lora)
        if self._embed_scale != 1.0:
            embedded_TD *= self._embed_scale
        rotations = self.rotations.of_step(position_T, rope_length_T, embedded_TD.dtype, lora)
        first, *later = [*(layer.attention_in for layer in self.decoder_layers()), self._last]
        residual_TD, x_TD = first.start(embedded_TD, lora)
        per_layer_TLp = None if self.per_layer is None else self.per_layer(token_T, residual_TD, lora)
        step = StepContext(rotations, position_T, slot_mapping_T, caches, attention, lora, per_layer_TLp, states)
        if self.streams is not None:
            stream_NTD = self.streams.start(residual_TD, lora)
            for layer in self.decoder_layers():
                stream_NTD = layer.alternate(stream_NTD, step)
            return self._last.read(self.streams.merge(stream_NTD, lora), lora)
        for layer, next_sum in zip(self.decoder_layers(), later, strict=True):
            if self.taps is not None:
                self.taps.take(layer.index, residual_TD)
            x_TD = layer(x_TD, residual_TD, step, next_sum)
        if self.taps is not None:
            self.taps.store(x_TD, slot_mapping_T)
        return x_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns this rank's columns, [T, W] in the model's dtype. They are -inf past the vocabulary's end."""
        return self.lm_head.logits(x_TD)

    def gather_logits(self, logits_TW: Tensor) -> Tensor:
        """Returns [T, V] on every rank, from what logits() returned on each."""
        return self.lm_head.gather(logits_TW)

    def tables(self) -> dict[str, VocabTable]:
        """Returns this rank's part of the tables of the vocabulary, by their whole module path."""
        embedding = {"model.embed_tokens": self.embed_tokens}
        return embedding if self.config.tie_word_embeddings else embedding | {"lm_head": self.lm_head}

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.layers)

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        """Returns this rank's part of every packed linear with its projections' module paths, in layer order. For a
        mixture of experts, this includes the router and the shared expert only."""
        of_layers = [
            (tuple(f"layers.{i}.{projection.name}" for projection in projections), linear)
            for i, layer in enumerate(self.decoder_layers())
            for projections, linear in zip(self.config.packed_projections(i), layer.packed_linears(), strict=True)
        ]
        outside = [] if self.per_layer is None else [self.per_layer.projection]
        outside += [] if self.streams is None else self.streams.packed_linears()
        names = [(projection.name,) for projection in self.config.projections_outside()]
        return [*of_layers, *zip(names, outside, strict=True)]

    def mixtures(self) -> list[tuple[str, SparseMLP]]:
        """Returns this rank's part of every mixture of experts, with its experts' module path."""
        found = []
        for i, layer in enumerate(self.decoder_layers()):
            if layer.mixture is not None:
                found.append((f"layers.{i}.{layer.mixture.experts.prefix}experts", layer.mixture))
        return found

    def sinks(self) -> dict[int, Tensor]:
        """Returns the sinks of the layers that have them, see AttentionSpec.sinks."""
        mixers = [layer.mixer for layer in self.decoder_layers()]
        attentions = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        return {attention.index: attention.sinks for attention in attentions if attention.sinks is not None}

    def recurrences(self) -> dict[int, DeltaNet | Mamba2 | ShortConv]:
        """Returns the parts of layers that have a state, by layer."""
        found = {}
        for i, layer in enumerate(self.decoder_layers()):
            mixer = layer.mixer.mamba if isinstance(layer.mixer, ParallelMixer) else layer.mixer
            if isinstance(mixer, DeltaNet | Mamba2 | ShortConv):
                found[i] = mixer
        return found

    def activation_numbers(self) -> list[tuple[str, Tensor]]:
        """Returns the numbers of each layer's activation, see MLP.numbers, with the activation's module path."""
        mlps = [(f"layers.{i}.mlp.act_fn", layer.mlp) for i, layer in enumerate(self.decoder_layers())]
        return [(name, mlp.numbers) for name, mlp in mlps if isinstance(mlp, MLP) and mlp.numbers is not None]

    def norms(self) -> list[tuple[str, Norm]]:
        """Returns every norm that has a weight, with its module path."""
        if not self.config.norm.has_weight:
            return []
        found = [
            (f"layers.{i}.{name}", norm)
            for i, layer in enumerate(self.decoder_layers())
            for name, norm in layer.norms().items()
        ]
        if self.per_layer is not None:
            found.append((PROJECTION_NORM, self.per_layer.norm))
        return [*found, (self.config.final_norm, self.norm)]

    def vectors(self) -> dict[str, Tensor]:
        """Returns the parameters that are whole on every rank and belong to no linear, norm or mixture, by the
        checkpoint's names below the model."""
        layers = enumerate(self.decoder_layers())
        found = {f"layers.{i}.{name}": vector for i, layer in layers for name, vector in layer.vectors().items()}
        return found if self.per_layer is None else found | {f"{TABLE}.weight": self.per_layer.table_VD}
