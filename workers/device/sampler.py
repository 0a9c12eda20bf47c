"""Computes tokens and logprobs from logits, for all rows of a step at once.

Random draws are a function of (seed, position) alone, see random_numbers.py.
"""

# B rows (tokens that are chosen in this step) · V vocabulary · W a rank's part of it · N ranks

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.sampling.draw_tokens import NEVER, NO_COUNTS, DrawFields
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.protocol.random_numbers import uniform
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.host_copy import Download
from lorafleet.workers.device.logit_edits import EditedRow
from lorafleet.workers.tp.group import TPGroup

MOST_PARTS = 64  # parts of a row of logits


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The values on which one row's draw depends."""

    params: SamplingParams
    num_tokens: int  # of prompt and answer, before the token that is chosen
    seed: int
    vocab_size: int  # of the row's own vocabulary, which may be smaller than the step's


def draw_fields(rows: list[SamplingRow], edited: Many[EditedRow], num_tokens: int) -> list[DrawFields]:
    """Returns what draw_tokens takes of each row. The logits, of num_tokens tokens, must have the edits of
    LogitEditor.apply by then."""
    counts_rows = {row.index: row.counts_row for row in edited}
    return [_draw_fields(row, counts_rows.get(i, NO_COUNTS), num_tokens) for i, row in enumerate(rows)]


def _draw_fields(row: SamplingRow, counts_row: int, num_tokens: int) -> DrawFields:
    params = row.params
    return DrawFields(
        temperature=0.0 if params.greedy else params.temperature,
        top_k=params.top_k if params.top_k > 0 else num_tokens,
        top_p=params.top_p,
        log_min_p=math.log(params.min_p) if params.min_p > 0 else NEVER,
        draw=0.0 if params.greedy else uniform(row.seed, row.num_tokens),
        last_token=row.vocab_size - 1,
        counts_row=counts_row,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


def greedy(logits_BV: Tensor) -> Tensor:
    """Returns the first of the largest logits, int64 [B].

    Works in two steps, since argmax assigns few threads to a row: it takes 28 us for one.
    """
    num_rows, vocab = logits_BV.shape
    parts = next(parts for parts in range(MOST_PARTS, 0, -1) if vocab % parts == 0)
    best_BP, index_BP = logits_BV.view(num_rows, parts, -1).max(dim=-1)
    part_B1 = best_BP.argmax(dim=-1, keepdim=True)
    return torch.add(index_BP.gather(1, part_B1), part_B1, alpha=vocab // parts).squeeze(1)


def greedy_of_ranks(logits_BW: Tensor, group: TPGroup) -> Tensor:
    """Returns greedy() of the whole vocabulary from each rank's own columns (DecoderModel.logits): int64 [B], on all
    ranks.

    The ranks exchange only their best logit and its token. float64 holds both exactly.
    """
    column_B = greedy(logits_BW)
    if group.size == 1:
        return column_B
    best_B = logits_BW.gather(1, column_B.unsqueeze(1)).squeeze(1)
    token_B = column_B + group.rank * logits_BW.shape[1]
    best_NB, token_NB = group.all_gather(torch.stack((best_B.double(), token_B.double()))).unbind(1)
    # The first of the largest is the lowest rank's, whose tokens come first.
    return token_NB.gather(0, best_NB.argmax(dim=0, keepdim=True)).squeeze(0).long()


class PendingLogprobs:
    """Logprobs on their way to the host: the chosen token's, and those of the num_top best tokens of each row."""

    def __init__(self, logprobs_BV: Tensor, chosen_B: Tensor, num_top: list[int], download: Download) -> None:
        """Queues the computation and the download. `logprobs_BV` are float32."""
        chosen_B1 = chosen_B.unsqueeze(1)
        own_B1 = logprobs_BV.gather(1, chosen_B1)
        # Ties with a smaller token id come first, as they do in topk's and argmax's order.
        ids_V = torch.arange(logprobs_BV.shape[1], device=logprobs_BV.device)
        ahead_BV = (logprobs_BV > own_B1) | ((logprobs_BV == own_B1) & (ids_V < chosen_B1))
        top = logprobs_BV.topk(max(num_top), dim=-1)
        columns = (chosen_B, own_B1.squeeze(1), ahead_BV.sum(-1) + 1, top.indices, top.values)
        self._columns = [download.add(column) for column in columns]
        self._num_top = num_top

    def read(self) -> list[TokenLogprobs]:
        """Returns the logprobs of each row. Call it once the download is done."""
        rows = zip(*(column.tolist() for column in self._columns), self._num_top, strict=True)
        return [TokenLogprobs(t, own, rank, ids[:n], values[:n]) for t, own, rank, ids, values, n in rows]
