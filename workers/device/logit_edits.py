"""Applies biases, minimal lengths, and lists of allowed and of banned tokens to logits before tokens are chosen, for
all rows of a step at once, and keeps the counts of tokens from which penalties are computed with the choice.

A sequence's ids and values are uploaded once, when it first samples. What its edits depend on stays on the device, and
goes on there with each token that is chosen: the counts of its tokens (token_counts.py), and how far it is in banned
sequences (banned_sequences.py). So a row with edits costs the host a few numbers per step, and a step may be launched
before the tokens and the length of the last one are known.
"""

# B rows of logits · N of them with a list of allowed tokens · V vocabulary · S sequences that sample
# P rows whose choices are counted · D rows behind drafts · K single logits

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.sampling.draw_tokens import NO_COUNTS
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.banned_sequences import (
    AnswerRows,
    BannedPlaces,
    BannedProgress,
    BannedRow,
    follow_drafts,
    follow_drawn,
    forbid,
)
from lorafleet.workers.device.host_copy import array_to_device, to_device
from lorafleet.workers.device.token_counts import TokenCounts
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence

NEVER = float("-inf")


@dataclass(slots=True, eq=False)
class LogitEdits:
    """The edits of one sequence, on the device."""

    params: SamplingParams
    bias_ids_K: Tensor | None
    bias_values_K: Tensor | None
    stop_ids_K: Tensor | None
    allowed_ids_K: Tensor | None  # if set, all other tokens are forbidden
    banned_ids_K: Tensor | None  # tokens that are always forbidden
    banned: BannedProgress | None = None  # set if some banned sequence has more than one token
    counts_row: int = NO_COUNTS  # row of TokenCounts, while the sequence has penalties and holds it


@dataclass(frozen=True, slots=True)
class EditedRow:
    """One row of logits with its edits."""

    index: int  # row of the logits
    edits: LogitEdits
    num_generated: int  # number of answer tokens before the one that is chosen now, with all drafts before it
    sequence: int  # index of its sequence among those that sample
    place: int = 0  # number of the step's drafts before it
    # row of TokenCounts that has all tokens before the one that is chosen now, or NO_COUNTS
    counts_row: int = NO_COUNTS
    short_1: Tensor | None = None  # number of drafts of the step before that turn out to be wrong; set if any may be

    @property
    def first(self) -> int:
        """The row behind the sequence's own last token."""
        return self.index - self.place


@dataclass(frozen=True, slots=True)
class EditedStep:
    """The edited rows of one step, those of a sequence in the order of its drafts."""

    rows: list[EditedRow] = field(default_factory=list)
    faults: list[tuple[Sequence, Exception]] = field(default_factory=list)  # Sequences that cannot go on, and why.

    def without(self, first_rows: set[int]) -> list[EditedRow]:
        """Returns the rows without those of the sequences that begin with these."""
        return [row for row in self.rows if row.first not in first_rows] if first_rows else self.rows


class LogitEditor:
    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = TokenCounts(max_num_seqs, vocab_size, device)
        self._edits: dict[Sequence, LogitEdits] = {}

    @property
    def counts_SV(self) -> Tensor:
        """The token counts on the device, see kernels/sampling/penalties.py."""
        return self._counts.counts_SV

    def prepare(
        self, sampling: Many[Chunk], token_B: Tensor, short_by_sequence: Mapping[Sequence, Tensor] | None = None
    ) -> EditedStep:
        """Returns the edits for the rows of these chunks, which must be those of launched steps, one after another.

        A sequence that fails is computed without edits all the same, since others may share what the step computes of
        its prompt. Its tokens are dropped.

        Args:
            token_B: The token that each of these rows computes, int64. The device alone need know it.
            short_by_sequence: UnreadInputs.short_B of each sequence with a minimal length, [1].
        """
        step, first = EditedStep(), 0
        shorts = short_by_sequence or {}
        for number, chunk in enumerate(sampling):
            sequence = chunk.sequence
            try:
                if sequence.params.edits_logits:
                    step.rows.extend(self._rows(chunk, first, number, shorts.get(sequence)))
            except Exception as error:
                step.faults.append((sequence, error))
            first += chunk.num_sampled
        if any(row.place for row in step.rows):
            self._follow_drafts(step.rows, token_B)
        return step

    def _rows(self, chunk: Chunk, first: int, number: int, short_1: Tensor | None) -> list[EditedRow]:
        """Returns the rows of one sequence, whose counts behind drafts are not filled yet."""
        sequence = chunk.sequence
        edits = self._edits.get(sequence)
        if edits is None:
            edits = self._edits[sequence] = self._upload(sequence)
        if sequence.params.penalizes and not self._counts.holds(edits.counts_row, sequence):
            edits.counts_row = self._counts.take(sequence)
        num_generated = sequence.num_generated + sequence.num_unverified
        rows = [EditedRow(first, edits, num_generated, number, 0, edits.counts_row, short_1)]
        for place in range(1, chunk.num_sampled):
            counts_row = NO_COUNTS if edits.counts_row == NO_COUNTS else self._counts.branch(edits.counts_row)
            rows.append(EditedRow(first + place, edits, num_generated + place, number, place, counts_row, short_1))
        return rows

    def _follow_drafts(self, rows: Many[EditedRow], token_B: Tensor) -> None:
        """Counts the drafts for the rows behind them, and finds how far they are in banned sequences."""
        branches = [row for row in rows if row.place and row.counts_row != NO_COUNTS]
        if branches:
            copies = [[row.edits.counts_row for row in branches], [row.counts_row for row in branches]]
            from_D, to_D = to_device(copies, torch.int64, self._device)
            self._counts.copy(from_D, to_D)
            added = [(row.counts_row, row.first + place) for row in branches for place in range(1, row.place + 1)]
            row_P, index_P = array_to_device(np.array(added, np.int64).T.copy(), self._device)
            self._counts.add(row_P, token_B[index_P])
        answers = _answers(rows)
        if answers:
            follow_drafts(answers, token_B, max(row.place for row in rows))

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        edits = self._edits.pop(sequence, None)
        if edits is not None and self._counts.holds(edits.counts_row, sequence):
            self._counts.release(edits.counts_row)

    def apply(self, logits_BV: Tensor, rows: Many[EditedRow]) -> Tensor:
        """Returns the logits with allowed and banned tokens, biases and minimal lengths, the first of vLLM's edits.
        They are changed in place, but as float32 if there are biases."""
        biased = [(row.index, row.edits.bias_ids_K) for row in rows if row.edits.bias_ids_K is not None]
        if biased:
            logits_BV = logits_BV.float()
            values = [row.edits.bias_values_K for row in rows if row.edits.bias_values_K is not None]
            logits_BV[self._places(biased)] += torch.cat(values)
        self._forbid_stops(logits_BV, rows)
        self._allow(logits_BV, rows)
        self._ban(logits_BV, rows)
        return logits_BV

    def _forbid_stops(self, logits_BV: Tensor, rows: Many[EditedRow]) -> None:
        """Forbids stop tokens to answers that are shorter than their minimal length, where their lengths are known, or
        may be shorter if drafts turn out to be wrong."""
        certain: list[tuple[int, Tensor]] = []
        possible: list[tuple[int, Tensor, Tensor]] = []  # With whether the answer is too short, bool [1].
        for row in rows:
            stop_ids_K, num_missing = row.edits.stop_ids_K, row.edits.params.min_tokens - row.num_generated
            if stop_ids_K is not None and num_missing > 0:
                certain.append((row.index, stop_ids_K))
            elif stop_ids_K is not None and row.short_1 is not None:
                possible.append((row.index, stop_ids_K, row.short_1 > -num_missing))
        if certain:
            self._forbid(logits_BV, certain)
        if possible:
            places = self._places([(index, stop_ids_K) for index, stop_ids_K, _ in possible])
            is_short_K = torch.cat([is_short_1.expand(len(ids_K)) for _, ids_K, is_short_1 in possible])
            logits_BV[places] = logits_BV[places].masked_fill(is_short_K, NEVER)

    def _allow(self, logits_BV: Tensor, rows: Many[EditedRow]) -> None:
        allowed = [(row.index, row.edits.allowed_ids_K) for row in rows if row.edits.allowed_ids_K is not None]
        if allowed:
            places = self._places(allowed)
            kept_K = logits_BV[places]
            row_N = to_device([index for index, _ in allowed], torch.int64, self._device)
            logits_BV.index_fill_(0, row_N, NEVER)
            logits_BV[places] = kept_K

    def _ban(self, logits_BV: Tensor, rows: Many[EditedRow]) -> None:
        banned = [(row.index, row.edits.banned_ids_K) for row in rows if row.edits.banned_ids_K is not None]
        if banned:
            self._forbid(logits_BV, banned)
        longer = [BannedRow(row.index, row.place, own) for row in rows if (own := row.edits.banned) is not None]
        if longer:
            forbid(logits_BV, longer)

    def count(
        self,
        drawn_B: Tensor,
        step: EditedStep,
        accepted_S: Tensor | None = None,
        late_rows: set[int] | None = None,
    ) -> None:
        """Takes in the tokens that were drawn, up to the one behind the last accepted draft.

        Args:
            accepted_S: As in DraftVerification. None if the step has no drafts.
            late_rows: First rows of the sequences that get no token.
        """
        for row in step.rows:
            if row.place and row.counts_row != NO_COUNTS:
                self._counts.release(row.counts_row)
        rows = step.without(late_rows or set())
        penalized = [row for row in rows if row.edits.params.penalizes]
        if penalized:
            columns = [(row.index, row.edits.counts_row, row.sequence, row.place) for row in penalized]
            index_P, row_P, sequence_P, place_P = array_to_device(np.array(columns, np.int64).T.copy(), self._device)
            is_right_P = None if accepted_S is None else place_P <= accepted_S[sequence_P]
            self._counts.add(row_P, drawn_B[index_P], is_right_P)
        answers = _answers(rows)
        if answers:
            # Rows behind drafts were prepared for all answers, or for none.
            follow_drawn(answers, drawn_B, accepted_S if any(row.place for row in rows) else None)

    def _upload(self, sequence: Sequence) -> LogitEdits:
        params = sequence.params
        bias = params.logit_bias
        stop_ids = sorted(sequence.stop_ids) if params.min_tokens else []
        allowed = params.allowed_token_ids
        banned = params.bad_words_token_ids or []
        single = sorted({tokens[0] for tokens in banned if len(tokens) == 1})
        places, answer = BannedPlaces.of(banned, self._device), sequence.tokens[sequence.num_prompt :]
        if places is not None and UNKNOWN in answer:
            raise RuntimeError("the tokens of the answer are not known yet")
        return LogitEdits(
            params,
            bias_ids_K=to_device(list(bias), torch.int64, self._device) if bias else None,
            bias_values_K=to_device(list(bias.values()), torch.float32, self._device) if bias else None,
            stop_ids_K=to_device(stop_ids, torch.int64, self._device) if stop_ids else None,
            allowed_ids_K=to_device(allowed, torch.int64, self._device) if allowed else None,
            banned_ids_K=to_device(single, torch.int64, self._device) if single else None,
            banned=None if places is None else BannedProgress.of(places, answer),
        )

    def _forbid(self, logits_BV: Tensor, rows: Many[tuple[int, Tensor]]) -> None:
        """Forbids these rows' ids."""
        places = self._places(rows)
        # A number that is assigned at places becomes a tensor of the host, and its copy would wait for the device.
        logits_BV.index_put_(places, logits_BV.new_full(places[0].shape, NEVER))

    def _places(self, rows: Many[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns rows and columns [K] of the logits that these rows' ids name."""
        lengths = [len(ids_K) for _, ids_K in rows]
        index_N, length_N = to_device([[index for index, _ in rows], lengths], torch.int64, self._device)
        # the size is given, so that nothing waits for it
        index_K = index_N.repeat_interleave(length_N, output_size=sum(lengths))
        return index_K, torch.cat([ids_K for _, ids_K in rows])


def _answers(rows: Many[EditedRow]) -> list[AnswerRows]:
    """Returns the answers among these rows that have banned sequences of more than one token."""
    return [
        AnswerRows(row.edits.banned, row.index, row.sequence)
        for row in rows
        if row.edits.banned is not None and not row.place
    ]
