"""Defines the EAGLE-3 head, one decoder layer that drafts from the target's hidden states.

Its input for a place is the embedding of the next token and the feature of the place, which the target has computed
(workers/models/feature_taps.py). For tokens that it drafts itself, its own hidden states are the features. It runs as
any model of the engine does.

Source: EAGLE-3 (arXiv 2503.01840). The names of tensors are those of its checkpoints.
"""

# T tokens · D hidden size · V the head's vocabulary · W this rank's part of it

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.device.state_cache import StepStates
from lorafleet.workers.models.attention import Attention, StepContext
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.decoder_layer import DecoderLayer
from lorafleet.workers.models.feature_taps import FeatureTaps
from lorafleet.workers.models.layers import Norm, PackedLinear, ResidualSum, parameter
from lorafleet.workers.models.linear_weights import LinearWeights
from lorafleet.workers.models.rope import Rotations
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.speculation.feature_rows import FeatureRows
from lorafleet.workers.tp.shard import Shard

NUM_TAPS = 3  # Hidden states of the target that make a feature.


def tapped_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers of the target whose inputs make a feature: an early one, one in the middle and a late one."""
    return 2, num_layers // 2, num_layers - 3


class EagleHead(nn.Module):
    """The head of one target. Each rank has its part of it, as of the target. It has no places for adapters.

    Args:
        config: The head's layer, with the vocabulary that it drafts.
        target: Provides the embedding, and the ranks.
        norms_residual: Whether the feature's norm is added to the layer's outputs, rather than the feature.
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
        norms_residual: bool,
        most_tokens: int,
        most_rows: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.group = target.group
        self.shard = Shard.of(config, self.group.rank, self.group.size)
        self._embedding = (target.embed_tokens,)  # A tuple, so that it does not count as a part of the head.
        self.layer = DecoderLayer(self.shard, 0, self.group, target.ranks, dtype, device)
        self._hold_linears(dtype, device)

        def residual_sum() -> ResidualSum:
            norm = Norm(config.hidden_size, config.norm, config.norm_dtype(dtype), device)
            return ResidualSum(norm, 1.0, config.norm.eps, target.ranks)

        self.feature_norm, self.last = residual_sum(), residual_sum()
        self.lm_head = VocabTable(self.shard, self.group, dtype, device)
        self.fused = parameter(config.hidden_size, NUM_TAPS * target.config.hidden_size, dtype=dtype, device=device)
        self.rotations = Rotations([attention.rope for attention in config.attentions], device)
        self._norms_residual = norms_residual
        self._num_target_layers = target.config.num_layers
        self.drafts = FeatureRows(config, dtype, device, most_tokens, most_rows)

    @property
    def embed_tokens(self) -> VocabTable:
        return self._embedding[0]

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
        normed_TD = self.feature_norm.read(feature_TD, None)
        residual_TD = normed_TD.clone() if self._norms_residual else feature_TD
        _, embedded_TD = self.layer.attention_in.start(embedded_TD, None)
        x_TD = torch.cat([embedded_TD, normed_TD], dim=1)
        assert self.layer.mixer is not None and self.layer.mlp is not None
        attended = self.layer.mixer(x_TD, step)
        out = self.layer.mlp(self.layer.mlp_in.add(attended, residual_TD, None), None)
        last_TD = self.last.add(out, residual_TD, None)
        self.drafts.hidden_TD[: len(token_T)].copy_(residual_TD)
        return last_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns this rank's columns of the tokens that the head drafts, [T, W]."""
        return self.lm_head.logits(x_TD)

    def gather_logits(self, logits_TW: Tensor) -> Tensor:
        return self.lm_head.gather(logits_TW)

    def tapped_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of what the target's step of so many tokens holds until its end: the hidden states that it
        has taken, the same side by side, and the features."""
        return (2 * NUM_TAPS + 1) * num_tokens * self.fused.shape[0] * self.fused.itemsize

    def taps(self) -> FeatureTaps:
        """Returns what writes the features in the target's steps."""
        return self.drafts.taps(tapped_layers(self._num_target_layers), self.fused)

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        """Returns none, since adapters do not change the head."""
        return []

    def mixtures(self) -> list[tuple[str, SparseMLP]]:
        return []

    def sinks(self) -> dict[int, Tensor]:
        return {}

    def norms(self) -> list[tuple[str, Norm]]:
        return []

    @property
    def wide_linear(self) -> PackedLinear:
        """The linear of q, k and v, which reads the embedding and the feature side by side."""
        assert isinstance(self.layer.mixer, Attention)
        return self.layer.mixer.qkv_proj

    def _hold_linears(self, dtype: torch.dtype, device: torch.device) -> None:
        """Gives the linears their weights."""
        weights, narrow = LinearWeights(dtype, device), self.wide_linear
        assert isinstance(self.layer.mixer, Attention)
        self.layer.mixer.qkv_proj = PackedLinear(
            2 * narrow.in_features, narrow.out_features, narrow.bias is not None, dtype, device
        )
        for linear in self.layer.packed_linears():
            linear.weight = weights.empty(None, sum(linear.out_features), linear.in_features, linear.dtype)
