"""Defines the head that a checkpoint has behind its last layer for one token more (multi-token prediction, MTP).

It is a decoder layer of the target's kind. Its input for a place is made of the embedding of the next token and the
place's feature, which is the output of the target's last norm. The target's own embedding and head are used. For tokens
that it drafts itself, its own hidden states are the features, as in vLLM: one layer drafts any number of tokens.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

# T tokens · D hidden size · W this rank's part of the vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.device.state_cache import StepStates
from lorafleet.workers.models.attention import StepContext
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.decoder_layer import DecoderLayer
from lorafleet.workers.models.delta_net import DeltaNet
from lorafleet.workers.models.feature_taps import FeatureTaps
from lorafleet.workers.models.layers import Norm, PackedLinear, ResidualSum, parameter
from lorafleet.workers.models.linear_weights import LinearWeights, hold_weights
from lorafleet.workers.models.mamba2 import Mamba2
from lorafleet.workers.models.rope import Rotations
from lorafleet.workers.models.short_conv import ShortConv
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.speculation.feature_rows import FeatureRows
from lorafleet.workers.tp.shard import Shard


class MTPHead(nn.Module):
    """The head of one target. Each rank has its part of it, as of the target. It has no places for adapters. A
    checkpoint fills it as it fills a decoder.

    Args:
        config: The layer as a model, from read_mtp_config().
        target: Provides embedding and head, and the ranks.
        most_tokens: Largest number of tokens of a step.
        most_rows: Largest number of tokens that a step chooses.
    """

    def __init__(
        self,
        config: ModelConfig,
        target: DecoderModel,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_tokens: int,
        most_rows: int,
    ) -> None:
        super().__init__()
        assert config.mtp is not None
        self.config = config
        self.group = target.group
        self.shard = Shard.of(config, self.group.rank, self.group.size)
        self._tables = (target.embed_tokens, target.lm_head)  # A tuple, so that they do not count as parts of the head.
        self._feeds_norm = config.mtp.feeds_norm

        def norm() -> Norm:
            return Norm(config.hidden_size, config.norm, config.norm_dtype(dtype), device)

        def residual_sum(norm: Norm) -> ResidualSum:
            return ResidualSum(norm, config.residual_scale, config.norm.eps, target.ranks)

        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self._embedded, self._feature, self._last = map(residual_sum, (self.enorm, self.hnorm, self.norm))
        self.layer = DecoderLayer(self.shard, 0, self.group, target.ranks, dtype, device)
        self.eh_proj = parameter(config.hidden_size, 2 * config.hidden_size, dtype=dtype, device=device)
        hold_weights(config, self.packed_linears(), self.mixtures(), LinearWeights(dtype, device))
        self.rotations = Rotations([attention.rope for attention in config.attentions], device)
        self.drafts = FeatureRows(config, dtype, device, most_tokens, most_rows)

    @property
    def embed_tokens(self) -> VocabTable:
        return self._tables[0]

    @property
    def lm_head(self) -> VocabTable:
        return self._tables[1]

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
        """Returns the last norm's output, [T, D]. The arguments are DecoderModel.forward's."""
        assert lora is None and states is None
        embedded_TD, feature_TD = self.embed_tokens.embed(token_T, None), self.drafts.features_of(len(token_T))
        rotations = self.rotations.of_step(position_T, rope_length_T, embedded_TD.dtype, None)
        step = StepContext(rotations, position_T, slot_mapping_T, caches, attention, None)
        _, embedded_TD = self._embedded.start(embedded_TD, None)
        joined_TE = torch.cat([embedded_TD, self._feature.read(feature_TD, None)], dim=1)
        residual_TD = F.linear(joined_TE, self.eh_proj)
        x_TD = self.layer.attention_in.read(residual_TD, None)
        last_TD: Tensor = self.layer(x_TD, residual_TD, step, self._last)
        self.drafts.hidden_TD[: len(token_T)].copy_(last_TD if self._feeds_norm else residual_TD)
        return last_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns this rank's columns, [T, W] in the target's dtype."""
        return self.lm_head.logits(x_TD)

    def gather_logits(self, logits_TW: Tensor) -> Tensor:
        return self.lm_head.gather(logits_TW)

    def taps(self) -> FeatureTaps:
        """Returns what writes the features in the target's steps."""
        return self.drafts.taps()

    def tables(self) -> dict[str, VocabTable]:
        """Returns none, since the target's are used."""
        return {}

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        """Returns the layer's packed linears, as DecoderModel does."""
        packed = zip(self.config.packed_projections(0), self.layer.packed_linears(), strict=True)
        return [
            (tuple(f"layers.0.{projection.name}" for projection in projections), linear)
            for projections, linear in packed
        ]

    def mixtures(self) -> list[tuple[str, SparseMLP]]:
        """Returns the layer's mixture of experts, if it has one, as DecoderModel does."""
        mixture = self.layer.mixture
        return [] if mixture is None else [(f"layers.0.{mixture.experts.prefix}experts", mixture)]

    def sinks(self) -> dict[int, Tensor]:
        return {}

    def recurrences(self) -> dict[int, DeltaNet | Mamba2 | ShortConv]:
        """Returns none, since the layer has attention."""
        return {}

    def activation_numbers(self) -> list[tuple[str, Tensor]]:
        return []

    def norms(self) -> list[tuple[str, Norm]]:
        """Returns every norm with its name below the model."""
        of_layer = [(f"layers.0.{name}", norm) for name, norm in self.layer.norms().items()]
        return [*of_layer, ("enorm", self.enorm), ("hnorm", self.hnorm), ("norm", self.norm)]

    def vectors(self) -> dict[str, Tensor]:
        """Returns the linear behind the two norms, which is never held quantized. Every rank has it whole, since a sum
        over the ranks would take longer."""
        return {"eh_proj.weight": self.eh_proj}
