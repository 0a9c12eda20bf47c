"""Computes the probabilities of the tokens from which a token was drawn, for requests that want the logprobs of the
distribution that was sampled, and not the model's.

Which tokens were kept is not decided again: rounding could then drop a token that was drawn. The kernel's own bounds
are applied to the same numbers, in the same float32 operations.
"""

# B rows of logits · V vocabulary · N bounds of a row · P rows whose logprobs are wanted

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.sampling.row_log_softmax import row_log_softmax

# Best logit, 1 / temperature, the farthest distance that min_p keeps, the cut of top_k and top_p as a distance, and the
# number of tokens that are kept at the cut. draw_tokens_triton.py says what a distance is.
NUM_BOUNDS = 5
NEVER = float("-inf")
SPAN_ROWS = 32  # rows that are computed at once, since each needs several copies of its logits


@dataclass(frozen=True, slots=True)
class KeptBounds:
    logits_BV: Tensor  # with penalties; must not change before logprobs() has been queued
    bounds_BN: Tensor  # float32

    def logprobs(self, rows: Sequence[int]) -> Tensor:
        """Returns the logprobs of these rows' tokens, float32 [P, V]; -inf for tokens that were not kept."""
        device = self.logits_BV.device
        logprobs_PV = torch.empty((len(rows), self.logits_BV.shape[1]), dtype=torch.float32, device=device)
        for first in range(0, len(rows), SPAN_ROWS):
            span = list(rows[first : first + SPAN_ROWS])
            index_P = torch.tensor(span)
            if device.type == "cuda":
                index_P = index_P.pin_memory().to(device, non_blocking=True)
            logprobs_PV[first : first + len(span)] = _span_logprobs(self.logits_BV[index_P], self.bounds_BN[index_P])
        return logprobs_PV


def _span_logprobs(logits_PV: Tensor, bounds_PN: Tensor) -> Tensor:
    best_P1, coldness_P1, farthest_P1, cut_P1, num_left_P1 = bounds_PN.split(1, dim=1)
    distance_PV = (best_P1 - logits_PV.float()) * coldness_P1
    is_tied_PV = distance_PV == cut_P1
    is_kept_PV = (distance_PV < cut_P1) | (is_tied_PV & (is_tied_PV.cumsum(dim=1, dtype=torch.int32) <= num_left_P1))
    is_kept_PV &= (distance_PV >= 0) & (distance_PV <= farthest_P1)
    return row_log_softmax(distance_PV.neg_().masked_fill_(~is_kept_PV, NEVER))
