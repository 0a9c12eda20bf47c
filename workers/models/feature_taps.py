"""Takes hidden states of the target out of its forward passes, as the features that a head drafts from.

A token's feature lies beside its keys and values: it has their slot. So whoever finds a cached prefix finds its
features too, and nothing has to be moved if a sequence is preempted.
"""

# T tokens · D hidden size · E numbers of a feature · N rows of features

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class FeatureTaps:
    """Writes one feature for each token of a step.

    Args:
        layers: The layers whose inputs are taken, ascending.
        fused: Weight of the linear that makes a feature of them, [E, D * number of layers]. None if the feature is the
            last norm's output.
        features_NE: Where features are written.
        first_row: Row of KV slot 0.
    """

    def __init__(self, layers: tuple[int, ...], fused: Tensor | None, features_NE: Tensor, first_row: int) -> None:
        self._layers = layers
        self._fused = fused
        self._features_NE = features_NE
        self._first_row = first_row
        self._taken: list[Tensor] = []  # The inputs that this forward pass has taken so far.

    def take(self, layer: int, residual_TD: Tensor) -> None:
        """Takes the input of a layer, if it is one of those. The residual may be overwritten afterwards."""
        if layer in self._layers:
            self._taken.append(residual_TD.clone())

    def store(self, last_TD: Tensor, slot_mapping_T: Tensor) -> None:
        """Writes the features of a forward pass, whose tokens have these KV slots. last_TD is its last norm's
        output."""
        feature_TE = last_TD if self._fused is None else F.linear(torch.cat(self._taken, dim=1), self._fused)
        self._taken = []
        self._features_NE.index_copy_(0, slot_mapping_T + self._first_row, feature_TE)
