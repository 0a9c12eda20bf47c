"""Applies biases, minimal lengths, and lists of allowed and of banned tokens to logits before tokens are chosen, for
all rows of a step at once, and keeps the counts of tokens from which penalties are computed with the choice.

A sequence's ids and values are uploaded once, when it first samples. Its tokens are counted on the device
(token_counts.py). So a row with edits costs the host a few numbers per step, and a step may be launched before the
last one's tokens are known.
"""

# B rows of logits · N of them with a list of allowed tokens · V vocabulary · S rows of counts
# P rows whose choices are recorded · K single logits

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.sampling.draw_tokens import NO_COUNTS
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.banned_sequences import BannedSequences
from lorafleet.workers.device.host_copy import to_device
from lorafleet.workers.device.token_counts import TokenCounts
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence

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
    banned: BannedSequences | None = None  # set if some banned sequence has more than one token
    last_token_1: Tensor | None = None  # a chosen token, int64, on the device; recorded for `banned` alone
    num_recorded: int = 0  # number of answer tokens up to that one
    counts_row: int = NO_COUNTS  # row of TokenCounts, while the sequence has penalties and holds it
    num_counted: int = 0  # number of the sequence's tokens that the row has


@dataclass(frozen=True, slots=True)
class EditedRow:
    """One row of logits with its edits."""

    index: int  # row of the logits
    edits: LogitEdits
    num_generated: int  # number of answer tokens before the one that is chosen now, drafts included
    banned_pairs: list[Tensor]  # int64 [2, K] each: a token, and the one that must not follow it
    counts_row: int  # row of TokenCounts that has all tokens before the one that is chosen now, or NO_COUNTS
    last_token_1: Tensor | None  # the last of these tokens, int64; set if there are banned_pairs
    follows_draft: bool = False  # whether the last of these tokens is a draft


class LogitEditor:
    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = TokenCounts(max_num_seqs, vocab_size, device)
        self._edits: dict[Sequence, LogitEdits] = {}

    @property
    def counts_SV(self) -> Tensor:
        """The token counts on the device, see kernels/sampling/penalties.py."""
        return self._counts.counts_SV

    def prepare(self, index: int, sequence: Sequence) -> EditedRow | None:
        """Returns the edits for the sequence's next sample in row `index`, with all of its tokens counted, or None if
        it has none.

        An exception concerns this sequence alone. The last step's tokens must have been counted.
        """
        if not sequence.params.edits_logits:
            return None
        edits = self._edits.get(sequence)
        if edits is None:
            edits = self._edits[sequence] = self._upload(sequence)
        if sequence.params.penalizes:
            self._hold_row(sequence, edits)
        pairs = [] if edits.banned is None else edits.banned.pairs_after(sequence.tokens, sequence.num_prompt)
        last_1 = self._last_token(sequence, edits) if pairs else None
        return EditedRow(index, edits, sequence.num_generated, pairs, edits.counts_row, last_1)

    def prepare_drafts(self, first: EditedRow, sequence: Sequence, drafts: Many[int]) -> list[EditedRow]:
        """Returns the edits for the rows behind `first`, in which one more draft token precedes each choice."""
        edits, rows = first.edits, [first]
        for i, draft in enumerate(drafts):
            counts_row = rows[-1].counts_row
            if counts_row != NO_COUNTS:
                counts_row = self._counts.branch(counts_row, draft)
            pairs: list[Tensor] = []
            if edits.banned is not None:
                pairs = edits.banned.pairs_after([*sequence.tokens, *drafts[: i + 1]], sequence.num_prompt)
            last_1 = to_device([draft], torch.int64, self._device) if pairs else None
            place = first.index + i + 1, edits, first.num_generated + i + 1
            rows.append(EditedRow(*place, pairs, counts_row, last_1, follows_draft=True))
        return rows[1:]

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
        unstoppable = [
            (row.index, row.edits.stop_ids_K)
            for row in rows
            if row.edits.stop_ids_K is not None and row.num_generated < row.edits.params.min_tokens
        ]
        if unstoppable:
            logits_BV[self._places(unstoppable)] = NEVER
        self._allow(logits_BV, rows)
        self._ban(logits_BV, rows)
        return logits_BV

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
            logits_BV[self._places(banned)] = NEVER
        paired = [(row, pairs_2K) for row in rows for pairs_2K in row.banned_pairs]
        if paired:
            lasts = [
                row.last_token_1.expand(pairs_2K.shape[1]) for row, pairs_2K in paired if row.last_token_1 is not None
            ]
            index_K, token_K = self._places([(row.index, pairs_2K[1]) for row, pairs_2K in paired])
            follows_K = torch.cat(lasts) == torch.cat([pairs_2K[0] for _, pairs_2K in paired])
            # One place may be in several pairs, of which some do not apply. These add 0.
            penalty_K = torch.zeros_like(follows_K, dtype=logits_BV.dtype).masked_fill_(follows_K, NEVER)
            logits_BV.index_put_((index_K, token_K), penalty_K, accumulate=True)

    def count(self, token_B: Tensor, rows: Many[EditedRow]) -> None:
        """Counts the tokens that were chosen, and records those on which banned sequences depend.

        A token that was chosen behind a draft may not count. If it does, prepare() counts it when the host knows it.
        """
        for row in rows:
            if row.follows_draft and row.counts_row != NO_COUNTS:
                self._counts.release(row.counts_row)
        rows = [row for row in rows if not row.follows_draft]
        penalized = [row for row in rows if row.edits.params.penalizes]
        if penalized:
            places = [[row.index for row in penalized], [row.counts_row for row in penalized]]
            index_P, row_P = to_device(places, torch.int64, self._device)
            self._counts.add(row_P, token_B[index_P])
        for row in penalized:
            row.edits.num_counted += 1
        recorded = [row for row in rows if row.edits.banned is not None]
        if recorded:
            token_P = token_B[to_device([row.index for row in recorded], torch.int64, self._device)]
            for place, row in enumerate(recorded):
                row.edits.last_token_1 = token_P[place : place + 1]
                row.edits.num_recorded = row.num_generated + 1

    def _upload(self, sequence: Sequence) -> LogitEdits:
        params = sequence.params
        bias = params.logit_bias
        stop_ids = sorted(sequence.stop_ids) if params.min_tokens else []
        allowed = params.allowed_token_ids
        banned = BannedSequences(params.bad_words_token_ids or (), self._device)
        return LogitEdits(
            params,
            bias_ids_K=to_device(list(bias), torch.int64, self._device) if bias else None,
            bias_values_K=to_device(list(bias.values()), torch.float32, self._device) if bias else None,
            stop_ids_K=to_device(stop_ids, torch.int64, self._device) if stop_ids else None,
            allowed_ids_K=to_device(allowed, torch.int64, self._device) if allowed else None,
            banned_ids_K=to_device(banned.single_ids, torch.int64, self._device) if banned.single_ids else None,
            banned=banned if banned.has_pairs else None,
        )

    def _hold_row(self, sequence: Sequence, edits: LogitEdits) -> None:
        if not self._counts.holds(edits.counts_row, sequence):
            edits.counts_row, edits.num_counted = self._counts.take(sequence), len(sequence.tokens)
        if edits.num_counted < len(sequence.tokens):  # drafts were accepted
            self._counts.add_known(edits.counts_row, sequence.tokens[edits.num_counted :])
            edits.num_counted = len(sequence.tokens)
        assert edits.num_counted == len(sequence.tokens), "each chosen token is counted"

    def _last_token(self, sequence: Sequence, edits: LogitEdits) -> Tensor:
        """Returns the sequence's last token on the device. The host knows it unless the last step chose it there."""
        if edits.num_recorded == sequence.num_generated:
            assert edits.last_token_1 is not None
            return edits.last_token_1
        assert sequence.tokens[-1] != UNKNOWN
        return to_device([sequence.tokens[-1]], torch.int64, self._device)

    def _places(self, rows: Many[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns rows and columns [K] of the logits that these rows' ids name."""
        lengths = [len(ids_K) for _, ids_K in rows]
        index_N, length_N = to_device([[index for index, _ in rows], lengths], torch.int64, self._device)
        # the size is given, so that nothing waits for it
        index_K = index_N.repeat_interleave(length_N, output_size=sum(lengths))
        return index_K, torch.cat([ids_K for _, ids_K in rows])
