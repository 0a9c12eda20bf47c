"""Defines what a checkpoint fills: a decoder, or the layer behind it that predicts one token more."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.models.delta_net import DeltaNet
from lorafleet.workers.models.layers import Norm, PackedLinear
from lorafleet.workers.models.mamba2 import Mamba2
from lorafleet.workers.models.short_conv import ShortConv
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.tp.shard import Shard


class CheckpointModel(Protocol):
    """One rank's part of a model that is filled from a checkpoint. Names are module paths below the model."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shard(self) -> Shard: ...

    @property
    def norm(self) -> Norm:
        """The norm behind the last layer."""

    def tables(self) -> dict[str, VocabTable]:
        """Returns the tables of the vocabulary that the checkpoint has for it, by their whole module path."""

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        """Returns every packed linear with the names of its projections."""

    def mixtures(self) -> list[tuple[str, SparseMLP]]:
        """Returns every mixture of experts with its experts' name."""

    def sinks(self) -> dict[int, Tensor]:
        """Returns the sinks of the layers that have them, see AttentionSpec.sinks."""

    def recurrences(self) -> dict[int, DeltaNet | Mamba2 | ShortConv]:
        """Returns the parts of layers that have a state, by layer."""

    def activation_numbers(self) -> list[tuple[str, Tensor]]:
        """Returns the numbers of each layer's activation, see MLP.numbers, with the activation's name."""

    def norms(self) -> list[tuple[str, Norm]]:
        """Returns every norm that has a weight, with its name."""

    def vectors(self) -> dict[str, Tensor]:
        """Returns the parameters that are whole on every rank and belong to no packed linear, norm or mixture, by the
        names of their tensors."""
