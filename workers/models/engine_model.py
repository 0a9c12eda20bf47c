"""Defines what the engine asks of a base model, whichever implementation runs it.

DecoderModel is our own decoder. TransformersModel runs transformers' module of an architecture that we have none for.
"""

# T tokens · D hidden size · V vocabulary · W this rank's part of the vocabulary

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache
from lorafleet.workers.bases.served_config import ServedConfig
from lorafleet.workers.device.state_cache import StepStates
from lorafleet.workers.models.layers import Norm, PackedLinear
from lorafleet.workers.models.rope import Rotations
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.model_shard import ModelShard


class EngineModel(Protocol):
    """One rank's part of a base model with places for adapters. All ranks of the group make the same calls."""

    @property
    def config(self) -> ServedConfig: ...

    @property
    def group(self) -> TPGroup: ...

    @property
    def shard(self) -> ModelShard: ...

    @property
    def embed_tokens(self) -> VocabTable: ...

    @property
    def rotations(self) -> Rotations | None:
        """The ropes of all layers, or None if the model's own module rotates."""

    @property
    def lm_head(self) -> VocabTable: ...

    def __call__(
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
        """Returns the last norm's output, [T, D]. `attention` must have planned this step. `states` is None if the
        model has no recurrent layers."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns this rank's columns, [T, W] in the model's dtype."""

    def gather_logits(self, logits_TW: Tensor) -> Tensor:
        """Returns [T, V] on every rank, from what logits() returned on each."""

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        """Returns every linear that adapters may change, with its projections' module paths."""

    def mixtures(self) -> list[tuple[str, SparseMLP]]:
        """Returns the mixtures of experts that adapters may change, with their experts' module paths."""

    def sinks(self) -> Mapping[int, Tensor]:
        """Returns the sinks of the layers that have them, see AttentionSpec.sinks."""

    def norms(self) -> list[tuple[str, Norm]]:
        """Returns the norms that adapters may replace, with their module paths."""
