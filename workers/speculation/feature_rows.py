"""Holds the features that a head drafts from, and what else its steps read and write beside StepInputs.

Nothing of it moves once it is allocated, so that captured graphs can read it.
"""

# T tokens · B rows that sample · D hidden size · N rows of features · W the head's vocabulary

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.device.host_copy import to_device
from lorafleet.workers.models.feature_taps import FeatureTaps


class FeatureRows:
    """The rows of one head.

    Args:
        config: The head's. Its vocabulary is what the head drafts.
        most_tokens: Largest number of tokens of a step.
        most_rows: Largest number of tokens that a step chooses.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, most_tokens: int, most_rows: int
    ) -> None:
        self.most_rows = most_rows
        self.target_id_W = torch.arange(config.vocab_size, device=device)  # The target's number of each drafted token.
        self.hidden_TD = torch.zeros(most_tokens, config.hidden_size, dtype=dtype, device=device)
        # One for each token that the last step has chosen, then one for each KV slot of the target.
        self.features_ND = torch.zeros(most_rows, config.hidden_size, dtype=dtype, device=device)
        self._source_T = torch.zeros(most_tokens, dtype=torch.int64, device=device)
        self._in_order_B = torch.arange(most_rows, device=device)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's feature."""
        return self.features_ND.shape[1] * self.features_ND.itemsize

    def allocate(self, num_slots: int) -> None:
        """Allocates the features of as many KV slots as the target has."""
        rows = self.most_rows + num_slots
        self.features_ND = self.features_ND.new_zeros(rows, self.features_ND.shape[1])

    def taps(self, layers: tuple[int, ...] = (), fused: Tensor | None = None) -> FeatureTaps:
        """Returns what writes the features in the target's steps. The arguments are those of FeatureTaps."""
        return FeatureTaps(layers, fused, self.features_ND, self.most_rows)

    def features_of(self, num_tokens: int) -> Tensor:
        """Returns the features of the step's tokens, in memory of its own."""
        return self.features_ND[self._source_T[:num_tokens]]

    def begin(self, sources: list[int] | Tensor) -> None:
        """Queues the row of features_ND that each token of the next step reads. A tensor is int64, on the device."""
        count = len(sources)
        if isinstance(sources, Tensor):
            self._source_T[:count].copy_(sources)
        elif count <= self.most_rows and sources == list(range(count)):
            self._source_T[:count].copy_(self._in_order_B[:count])
        else:
            self._source_T[:count].copy_(to_device(sources, torch.int64, self._source_T.device), non_blocking=True)

    def end(self, sampling: list[int], sampled_B: Tensor) -> None:
        """Takes over the hidden states of the rows that have sampled, and replaces the tokens by the target's."""
        count = len(sampling)
        rows_B = to_device(sampling, torch.int64, sampled_B.device)
        self.features_ND[:count].copy_(self.hidden_TD[rows_B])
        sampled_B[:count].copy_(self.target_id_W[sampled_B[:count]])
