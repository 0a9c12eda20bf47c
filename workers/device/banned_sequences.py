"""Finds the tokens that would complete a banned sequence of tokens. One sequence's bans are uploaded once.

The host may not know the answer's last token yet when a step is launched. So it compares all but the last two tokens
of a banned sequence with the answer, and the device compares the last but one: `if it was chosen, forbid the last`.
"""

# K pairs of a token and the one that must not follow it

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from lorafleet.workers.device.host_copy import to_device


class BannedSequences:
    """The banned sequences of one request, each of at least one token."""

    def __init__(self, sequences: Many[Many[int]], device: torch.device) -> None:
        single = sorted({tokens[0] for tokens in sequences if len(tokens) == 1})
        pairs: dict[tuple[int, ...], list[list[int]]] = {}
        for *before, last_but_one, last in (tokens for tokens in sequences if len(tokens) > 1):
            pairs.setdefault(tuple(before), []).append([last_but_one, last])
        self.single_ids: list[int] = single  # Tokens that may never come.
        self._spans: dict[tuple[int, ...], slice] = {}  # Columns of the pairs that count after these tokens.
        columns: list[list[int]] = []
        for before_tokens, found in pairs.items():
            self._spans[before_tokens] = slice(len(columns), len(columns) + len(found))
            columns += found
        self._lengths = sorted({len(before_tokens) for before_tokens in pairs})
        # The token that must have been chosen last, and the one that must not follow it: int64 [2, K].
        self._pairs_2K = to_device([list(row) for row in zip(*columns, strict=True)], torch.int64, device)

    @property
    def has_pairs(self) -> bool:
        return bool(self._lengths)

    def pairs_after(self, tokens: Many[int], num_prompt: int) -> list[Tensor]:
        """Returns the pairs, int64 [2, K] each, that count for the answer so far. Its last token need not be known.

        Only the answer's tokens count: a sequence that began in the prompt is not banned, as in vLLM.
        """
        found: list[Tensor] = []
        for length in self._lengths:
            first = len(tokens) - 1 - length
            span = self._spans.get(tuple(tokens[first:-1])) if first >= num_prompt else None
            if span is not None:
                found.append(self._pairs_2K[:, span])
        return found
