"""Compares draft tokens with those that the model draws in their places, where both are: on the device.

The draw of each place is a function of the request's seed and the position alone. So up to the first draft that is
wrong, the drawn tokens are those of steps without drafts, whether they are the likeliest or sampled. No rejection
sampling is needed, and no answer depends on what was drafted.
"""

# B rows of a step that sample · S sequences that sample · K most draft tokens of one of them

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.device.host_copy import array_to_device
from lorafleet.workers.schedule.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class VerifiedRows:
    """The rows of one sequence in a step that verifies drafts."""

    index: int  # Index of the sequence among those that sample.
    first: int  # The first of its rows among those that sample: that of the token before its drafts.
    num_drafts: int


@dataclass(frozen=True, slots=True)
class DraftVerification:
    """The results of a step with drafts. The tensors are on the device, int64, and the host need not know them."""

    number: int  # Number of the step.
    rows: dict[Sequence, VerifiedRows]
    drawn_B: Tensor  # The token that each row has drawn. The next step overwrites it.
    accepted_S: Tensor  # Number of drafts that each sequence goes on with.

    @classmethod
    def of(
        cls,
        number: int,
        sampling: Many[Chunk],
        token_B: Tensor,
        drawn_B: Tensor,
        most_accepted: Mapping[Sequence, int] | None = None,
    ) -> DraftVerification:
        """Compares the drafts of these chunks, which have the rows one after another.

        Args:
            token_B: The token that each row has computed: a sequence's own, or a draft.
            most_accepted: Largest number of accepted drafts of sequences that have fewer drafts or masks than rows.
        """
        counts = [len(chunk.drafts) for chunk in sampling]
        starts = list(accumulate((1 + count for count in counts), initial=0))
        rows = {
            chunk.sequence: VerifiedRows(index, first, count)
            for index, (chunk, first, count) in enumerate(zip(sampling, starts, counts, strict=False))
        }
        if most_accepted:
            pairs = zip(sampling, counts, strict=True)
            counts = [min(count, most_accepted.get(chunk.sequence, count)) for chunk, count in pairs]
        first_S, count_S = array_to_device(np.array([starts[:-1], counts]), token_B.device)
        return cls(number, rows, drawn_B, count_accepted(token_B, drawn_B, first_S, count_S, max(counts)))


def warm_up_verification(device: torch.device) -> None:
    """Compares one draft, so that the first step with drafts does not wait until the device has loaded the kernels."""
    first_S, count_S = array_to_device(np.array([[0], [1]]), device)
    token_B = torch.zeros(2, dtype=torch.int64, device=device)
    count_accepted(token_B, token_B, first_S, count_S, 1)


def count_accepted(token_B: Tensor, drawn_B: Tensor, first_S: Tensor, count_S: Tensor, most: int) -> Tensor:
    """Returns how many of each sequence's first drafts equal the tokens drawn in their places, int64 [S].

    Args:
        token_B, drawn_B: As in DraftVerification.of.
        first_S: First row of each sequence, int64.
        count_S: Number of its drafts, int64, at most `most`. They are in the rows behind the first.
    """
    place_K = torch.arange(most, device=token_B.device)
    row_SK = (first_S[:, None] + place_K).clamp_(max=len(token_B) - 2)
    is_right_SK = (drawn_B[row_SK] == token_B[row_SK + 1]) & (place_K < count_S[:, None])
    return is_right_SK.cumprod(1).sum(1)
