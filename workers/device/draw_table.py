"""Holds what the draws of each sequence depend on. So the draws of a step cost the host a few array operations, and
nearly nothing for each sequence.

Random draws are a function of (seed, position) alone, see random_numbers.py.
"""

# B rows (tokens that are chosen in a step) · F fields of a row · N sequences that have sampled and have not ended
# K lengths that a sequence may turn out to have

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from operator import is_

import numpy as np

from lorafleet.kernels.sampling.draw_tokens import COUNTS_ROW, DRAW, NEVER, NO_COUNTS, NUM_FIELDS, DrawFields, DrawTable
from lorafleet.protocol.random_numbers import uniform
from lorafleet.workers.device.logit_edits import EditedRow
from lorafleet.workers.schedule.sequence import Chunk, Sequence

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

NO_ROW = -1
ALL_TOKENS = 0  # DrawFields.top_k in the held rows, if all tokens are kept
TEMPERATURE, TOP_K = (DrawFields._fields.index(name) for name in ("temperature", "top_k"))


class DrawRows:
    """The rows of all sequences that have sampled. They take memory until release()."""

    def __init__(self) -> None:
        self._row_by_sequence: dict[Sequence, int] = {}
        self._free: list[int] = []
        self._fields_NF: DrawTable = np.zeros((0, NUM_FIELDS))
        self._seed_N = np.zeros(0, np.uint64)
        self._last: tuple[Many[Chunk], Ints] = (), np.zeros(0, np.int64)  # The last chunks, and the row of each.

    def __len__(self) -> int:
        return len(self._row_by_sequence)

    def of_step(self, sampling: Many[Chunk], position_B: Ints, edited: Many[EditedRow], num_tokens: int) -> DrawTable:
        """Returns what draw_tokens takes: a row for each token that these chunks sample. Each token is drawn as if the
        drafts before it were the answer, those in flight too.

        Args:
            position_B: The position of each of these tokens.
            edited: Rows whose logits have the edits of LogitEditor.apply by then.
            num_tokens: Number of tokens that the logits are of.
        """
        row_B = self._rows_of(sampling, len(position_B))
        table_BF = self._fields_NF[row_B]
        table_BF[table_BF[:, TOP_K] == ALL_TOKENS, TOP_K] = num_tokens
        draw_B = uniform(self._seed_N[row_B], position_B.astype(np.uint64))
        table_BF[:, DRAW] = np.where(table_BF[:, TEMPERATURE] > 0, draw_B, 0.0)
        for row in edited:
            table_BF[row.index, COUNTS_ROW] = row.counts_row
        return table_BF

    def by_length(self, sampling: Many[Chunk], position_B: Ints, most_short: int) -> DrawTable:
        """Returns the draw of each of these tokens if its sequence turns out to be 0 to most_short tokens shorter than
        with all drafts in flight, [B, K]. The arguments are those of of_step()."""
        row_B = self._rows_of(sampling, len(position_B))
        position_BK = position_B[:, None] - np.arange(1 + most_short)
        draw_BK = uniform(self._seed_N[row_B][:, None], position_BK.astype(np.uint64))
        is_drawn_B1 = self._fields_NF[row_B, TEMPERATURE][:, None] > 0
        return np.where(is_drawn_B1, draw_BK, 0.0)

    def _rows_of(self, sampling: Many[Chunk], num_tokens: int) -> Ints:
        """Returns the held row of each of the tokens that these chunks sample."""
        last, row_B = self._last
        if len(sampling) != len(last) or not all(map(is_, sampling, last)):  # Decodes have the same chunk in each step.
            found = [self._row_by_sequence.get(chunk.sequence, NO_ROW) for chunk in sampling]
            row_B = np.array(found, np.int64)
            for i in np.flatnonzero(row_B == NO_ROW).tolist():
                row_B[i] = self._new_row(sampling[i].sequence)
            self._last = tuple(sampling), row_B
        return row_B if num_tokens == len(row_B) else row_B.repeat([1 + len(chunk.drafts) for chunk in sampling])

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        row = self._row_by_sequence.pop(sequence, None)
        if row is not None:
            self._free.append(row)

    def _new_row(self, sequence: Sequence) -> int:
        if not self._free:
            self._grow()
        row = self._row_by_sequence[sequence] = self._free.pop()
        self._fields_NF[row] = _fields(sequence)
        self._seed_N[row] = sequence.seed % 2**64
        return row

    def _grow(self) -> None:
        size = len(self._seed_N)
        self._free = list(range(size, 2 * size + 1))
        self._fields_NF = np.concatenate((self._fields_NF, np.zeros((size + 1, NUM_FIELDS))))
        self._seed_N = np.concatenate((self._seed_N, np.zeros(size + 1, np.uint64)))


def _fields(sequence: Sequence) -> DrawFields:
    """Returns the fields that are the same for all draws of a sequence."""
    params = sequence.params
    return DrawFields(
        temperature=0.0 if params.greedy else params.temperature,
        top_k=params.top_k if params.top_k > 0 else ALL_TOKENS,
        top_p=params.top_p,
        log_min_p=math.log(params.min_p) if params.min_p > 0 else NEVER,
        draw=0.0,
        last_token=sequence.vocab_size - 1,
        counts_row=NO_COUNTS,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )
