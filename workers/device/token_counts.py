"""Counts the tokens of running sequences that have penalties, on the device, with one row for each.

A row is built once from the tokens that the host knows. Each chosen token is added as soon as the device has it, and
each draft as soon as it is found right, so that no step needs the history from the host. kernels/sampling/penalties.py
says what a count holds.
"""

# S rows · V tokens of the widest vocabulary · P rows of a step · D rows behind drafts

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.sampling.penalties import IN_PROMPT
from lorafleet.workers.device.host_copy import to_device
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence

FIRST_ROWS = 8


class TokenCounts:
    """The counts of all sequences. `most_rows` is the largest number of tokens that a step chooses.

    Memory is allocated when it is needed: at most one row per running sequence, and one per draft token of a step.
    """

    def __init__(self, most_rows: int, vocab_size: int, device: torch.device) -> None:
        self._most_rows = most_rows
        self.counts_SV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._holders: dict[int, Sequence] = {}

    def take(self, sequence: Sequence) -> int:
        """Returns a row with the sequence's tokens. If no row is free, rows of preempted sequences are taken, which
        get others when they run again."""
        if sequence.tokens[-1] == UNKNOWN:
            raise RuntimeError("the tokens to count are not known yet")
        if sequence.vocab_size > self.counts_SV.shape[1]:
            self.counts_SV = _enlarged(self.counts_SV, len(self.counts_SV), sequence.vocab_size)
        row = self._take_free(sequence)
        self._fill(row, sequence)
        return row

    def branch(self, row: int) -> int:
        """Returns another row for the same sequence, which copy() fills."""
        return self._take_free(self._holders[row])

    def copy(self, from_D: Tensor, to_D: Tensor) -> None:
        """Gives rows the counts of others, int64."""
        self.counts_SV.index_copy_(0, to_D, self.counts_SV.index_select(0, from_D))

    def holds(self, row: int, sequence: Sequence) -> bool:
        return self._holders.get(row) is sequence

    def release(self, row: int) -> None:
        del self._holders[row]
        self._free.append(row)

    def add(self, row_P: Tensor, token_P: Tensor, counts_P: Tensor | None = None) -> None:
        """Counts one more token in each of these rows, which may be the same. Those for which counts_P, bool, is False
        are left out."""
        one_P = torch.ones_like(token_P, dtype=torch.int32) if counts_P is None else counts_P.int()
        place_P = row_P * self.counts_SV.shape[1] + token_P
        self.counts_SV.view(-1).scatter_add_(0, place_P, one_P)

    def _take_free(self, holder: Sequence) -> int:
        if not self._free:
            self._make_room()
        row = self._free.pop()
        self._holders[row] = holder
        return row

    def _make_room(self) -> None:
        preempted = [row for row, sequence in self._holders.items() if sequence.blocks is None]
        for row in preempted:
            self.release(row)
        if preempted:
            return
        before = len(self.counts_SV)
        assert before < self._most_rows, "a token that a step may choose has one row"
        num_rows = min(self._most_rows, max(FIRST_ROWS, 2 * before))
        self.counts_SV = _enlarged(self.counts_SV, num_rows, self.counts_SV.shape[1])
        self._free += range(before, num_rows)

    def _fill(self, row: int, sequence: Sequence) -> None:
        """Fills a row with a sequence's tokens. Tokens of the prompt matter only to the repetition penalty."""
        device, first = self.counts_SV.device, sequence.num_prompt
        count_V = self.counts_SV[row].zero_()  # a wider vocabulary's counts must not stay behind
        if sequence.params.repetition_penalty != 1.0:
            count_V.index_fill_(0, to_device(sequence.tokens[:first], torch.int64, device), IN_PROMPT)
        token_P = to_device(sequence.tokens[first:], torch.int64, device)
        count_V.scatter_add_(0, token_P, torch.ones_like(token_P, dtype=torch.int32))


def _enlarged(before: Tensor, num_rows: int, num_columns: int) -> Tensor:
    after = before.new_zeros((num_rows, num_columns))
    after[: before.shape[0], : before.shape[1]] = before
    return after
