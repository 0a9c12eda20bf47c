"""Finds the tokens that would complete a banned sequence of tokens, on the device, which knows each token first.

Each request has a row of places: all tokens but the last of each of its banned sequences, one behind another. A place
is reached if the answer ends with the tokens of the sequence up to there. Each token of the answer moves this on. So
nothing needs the answer's tokens from the host, and drafts are tokens like others.

Source: the Shift-And method (Baeza-Yates and Gonnet, CACM 35, 1992).
"""

# P places · K sequences · B rows of a step · R rows of one answer: that of its last token, and one for each draft

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.device.host_copy import array_to_device

MOST_PLACES = 1 << 22  # Places that are moved on at once, which takes some 20 bytes for each.
MOST_ENDS = 1 << 20  # Sequences whose last tokens are forbidden at once, which takes some 80 bytes for each.

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class BannedPlaces:
    """The places of one request."""

    token_P: Tensor  # The token with which the place is reached, int32.
    is_first_P: Tensor  # Whether a sequence begins here, bool.
    end_K: Tensor  # The place of each sequence's last but one token, int64.
    last_K: Tensor  # Each sequence's last token, int64.

    @classmethod
    def of(cls, sequences: Many[Many[int]], device: torch.device) -> BannedPlaces | None:
        """Returns the places of these sequences, or None if none of them has more than one token."""
        longer = [tokens for tokens in sequences if len(tokens) > 1]
        if not longer:
            return None
        length_K = np.array([len(tokens) - 1 for tokens in longer])
        end_K = length_K.cumsum() - 1
        fields_2P = np.zeros((2, int(length_K.sum())), np.int32)
        fields_2P[0] = [token for tokens in longer for token in tokens[:-1]]
        fields_2P[1, end_K - length_K + 1] = 1
        token_P, is_first_P = array_to_device(fields_2P, device)
        ends_2K = array_to_device(np.array([end_K, [tokens[-1] for tokens in longer]]), device)
        return cls(token_P, is_first_P.bool(), *ends_2K)

    def __len__(self) -> int:
        return len(self.token_P)

    def move(self, reached_P: Tensor, token_P: Tensor) -> Tensor:
        """Returns the places that are reached, bool, one token later.

        Args:
            reached_P: Those before, bool.
            token_P: The answer's new token, for each place.
        """
        return (reached_P.roll(1) | self.is_first_P) & (self.token_P == token_P)


@dataclass(slots=True, eq=False)
class BannedProgress:
    """The progress of one answer in its banned sequences."""

    places: BannedPlaces
    # What is reached behind the answer's tokens, and behind each draft of the step that is being prepared, bool [R, P].
    reached_RP: Tensor

    @classmethod
    def of(cls, places: BannedPlaces, answer: Many[int]) -> BannedProgress:
        """Returns the progress of an answer whose tokens the host knows. A sequence that began in the prompt is not
        banned, as in vLLM."""
        reached_P = torch.zeros_like(places.is_first_P)
        for token in answer:
            reached_P = places.move(reached_P, torch.full_like(places.token_P, token))
        return cls(places, reached_P.unsqueeze(0))


class AnswerRows(NamedTuple):
    """The rows of one answer in a step."""

    progress: BannedProgress
    first: int  # The row of its last token. Its drafts are behind it.
    sequence: int  # Its index among the sequences that sample.


def follow_drafts(answers: Many[AnswerRows], token_B: Tensor, most_drafts: int) -> None:
    """Extends reached_RP of these answers by a row for each draft.

    Args:
        token_B: The token that each row has computed, int64.
        most_drafts: Largest number of drafts of one answer, at least 1. The rows of answers with fewer are arbitrary.
    """
    for group in _groups(answers, _num_places, MOST_PLACES):
        places, row_P = _joined(group), _for_places(group, [answer.first for answer in group], token_B.device)
        reached = [torch.cat([answer.progress.reached_RP[0] for answer in group])]
        for place in range(1, most_drafts + 1):
            token_P = token_B.int().index_select(0, (row_P + place).clamp_(max=len(token_B) - 1))
            reached.append(places.move(reached[-1], token_P))
        _store(group, torch.stack(reached))


def follow_drawn(answers: Many[AnswerRows], drawn_B: Tensor, accepted_S: Tensor | None) -> None:
    """Moves these answers on to the tokens that were drawn.

    Args:
        drawn_B: The token that each row has drawn, int64.
        accepted_S: As in DraftVerification. None if the step has no drafts.
    """
    for group in _groups(answers, _num_places, MOST_PLACES):
        row_P = _for_places(group, [answer.first for answer in group], drawn_B.device)
        if accepted_S is None:
            reached_P = torch.cat([answer.progress.reached_RP[0] for answer in group])
        else:
            index_P = _for_places(group, [answer.sequence for answer in group], drawn_B.device)
            accepted_P = accepted_S.index_select(0, index_P)
            reached_RP = torch.cat([answer.progress.reached_RP for answer in group], dim=1)
            reached_P, row_P = reached_RP.gather(0, accepted_P.unsqueeze(0)).squeeze(0), row_P + accepted_P
        token_P = drawn_B.int().index_select(0, row_P)
        _store(group, _joined(group).move(reached_P, token_P).unsqueeze(0))


@dataclass(frozen=True, slots=True)
class BannedRow:
    """A row of logits whose answer has banned sequences."""

    index: int  # Row of the logits.
    place: int  # Number of drafts before it.
    progress: BannedProgress


def forbid(logits_BV: Tensor, rows: Many[BannedRow]) -> None:
    """Forbids the tokens that would complete a sequence. Changes the logits in place."""
    for group in _groups(rows, lambda row: len(row.progress.places.end_K), MOST_ENDS):
        _forbid_group(logits_BV, group)


def _forbid_group(logits_BV: Tensor, rows: Many[BannedRow]) -> None:
    reached_N = torch.cat([row.progress.reached_RP[row.place] for row in rows])
    places = [row.progress.places for row in rows]
    counts = [len(own.end_K) for own in places]
    starts = [0, *accumulate(map(len, places))][: len(rows)]
    fields_3R = array_to_device(np.array([[row.index for row in rows], starts, counts]), logits_BV.device)
    row_N, start_N = fields_3R[:2].repeat_interleave(fields_3R[2], dim=1, output_size=sum(counts))
    place_N = start_N + torch.cat([own.end_K for own in places])
    last_N = torch.cat([own.last_K for own in places])
    is_forbidden_N = reached_N[place_N]
    # One token may end several sequences, of which some are not reached. These add 0.
    penalty_N = torch.zeros_like(is_forbidden_N, dtype=logits_BV.dtype).masked_fill_(is_forbidden_N, float("-inf"))
    logits_BV.index_put_((row_N, last_N), penalty_N, accumulate=True)


def _groups(parts: Many[Part], size_of: Callable[[Part], int], most: int) -> Iterator[list[Part]]:
    """Yields groups of parts whose sizes are at most `most` together, or of one part that is larger."""
    group: list[Part] = []
    total = 0
    for part in parts:
        total += size_of(part)
        if group and total > most:
            yield group
            group, total = [], size_of(part)
        group.append(part)
    if group:
        yield group


def _num_places(answer: AnswerRows) -> int:
    return len(answer.progress.places)


def _joined(group: Many[AnswerRows]) -> BannedPlaces:
    """Returns the places of all answers of a group, one behind another, for BannedPlaces.move."""
    parts = [answer.progress.places for answer in group]
    if len(parts) == 1:
        return parts[0]
    none = parts[0].end_K[:0]
    return BannedPlaces(torch.cat([p.token_P for p in parts]), torch.cat([p.is_first_P for p in parts]), none, none)


def _for_places(group: Many[AnswerRows], values: list[int], device: torch.device) -> Tensor:
    """Returns the value of each answer for each of its places, int64."""
    lengths = [len(answer.progress.places) for answer in group]
    value_N, length_N = array_to_device(np.array([values, lengths]), device)
    spread_P: Tensor = value_N.repeat_interleave(length_N, output_size=sum(lengths))  # So nothing waits for the size.
    return spread_P


def _store(group: Many[AnswerRows], reached_RP: Tensor) -> None:
    parts = reached_RP.split([len(answer.progress.places) for answer in group], dim=1)
    for answer, part in zip(group, parts, strict=True):
        answer.progress.reached_RP = part
