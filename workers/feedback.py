"""Tokens from one step to the next without the host: a step that is launched before the last one's tokens are known
takes them from the device."""

# B rows that sample · T tokens of a step

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.workers.host_copy import to_device
from lorafleet.workers.sequence import UNKNOWN


@dataclass(frozen=True, slots=True)
class Feedback:
    """sampled_B: the last step's tokens, int64 on the device. source_T: for each token of this step its row there,
    or -1 where the host knew it; int64 on the device."""

    sampled_B: Tensor
    source_T: Tensor

    @classmethod
    def of(
        cls, tokens: Sequence[int], request_ids: Sequence[str], sampled_B: Tensor, row_of: Mapping[str, int]
    ) -> Feedback | None:
        """tokens and request_ids: of this step, token by token. row_of: the request's row in sampled_B. None where the
        host knows every token."""
        if UNKNOWN not in tokens:
            return None
        source = [row_of[r] if t == UNKNOWN else -1 for t, r in zip(tokens, request_ids, strict=True)]
        return cls(sampled_B, to_device(source, torch.int64, sampled_B.device))

    def fill(self, token_T: Tensor) -> None:
        """Puts the tokens in their places, in place."""
        known = self.source_T < 0
        token_T.copy_(torch.where(known, token_T, self.sampled_B[self.source_T.clamp(min=0)]))
