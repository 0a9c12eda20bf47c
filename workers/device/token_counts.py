"""Counts the tokens of running sequences that have penalties, on the device, with one row for each.

A row is built once from the tokens that the host knows. Each chosen token is added as soon as the device has it, so
that no step needs the history from the host. Beside the counts are the ids whose counts may be above zero. So
penalties cost time in proportion to the history, not to the vocabulary.
"""

# S rows · V tokens of the widest vocabulary · L ids of the longest row · P rows of a step

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.workers.device.host_copy import to_device
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence

IN_PROMPT = 1 << 30  # bit that is set in the count of a prompt token; answers are far shorter
FIRST_ROWS, FIRST_IDS = 8, 256


class TokenCounts:
    """The counts of all sequences. `most_rows` is the largest number of sequences that run at a time.

    Memory is allocated when it is needed: at most one row per running sequence, of the vocabulary's size and of the
    longest history.
    """

    def __init__(self, most_rows: int, vocab_size: int, device: torch.device) -> None:
        self._most_rows = most_rows
        self._counts_SV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._ids_SL = torch.zeros((0, FIRST_IDS), dtype=torch.int32, device=device)
        self._num_ids: list[int] = []  # of each row; the rest of its ids_SL is token 0
        self._free: list[int] = []
        self._holders: dict[int, Sequence] = {}

    @property
    def num_bytes(self) -> int:
        return self._counts_SV.nbytes + self._ids_SL.nbytes

    def take(self, sequence: Sequence) -> int:
        """Returns a row with the sequence's tokens. If no row is free, rows of preempted sequences are taken, which
        get others when they run again."""
        if sequence.tokens[-1] == UNKNOWN:
            raise RuntimeError("the tokens to count are not known yet")
        if sequence.vocab_size > self._counts_SV.shape[1]:
            self._counts_SV = _enlarged(self._counts_SV, len(self._counts_SV), sequence.vocab_size)
        if not self._free:
            self._make_room()
        row = self._free.pop()
        self._holders[row] = sequence
        self._fill(row, sequence)
        return row

    def holds(self, row: int, sequence: Sequence) -> bool:
        return self._holders.get(row) is sequence

    def release(self, row: int) -> None:
        del self._holders[row]
        self._free.append(row)

    def read(self, rows: list[int], row_P: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids, int64 [P, L], and their counts, int32 [P, L]. Shorter rows are padded with token 0 and its own
        count."""
        num_ids = max(self._num_ids[row] for row in rows)
        ids_PL = self._ids_SL[row_P, :num_ids].long()
        return ids_PL, self._counts_SV[row_P.unsqueeze(1), ids_PL]

    def add(self, rows: list[int], row_P: Tensor, token_P: Tensor) -> None:
        """Counts one more token in each of these rows, which must be distinct."""
        ends = [self._num_ids[row] for row in rows]
        self._make_room_for_ids(max(ends) + 1)
        self._counts_SV[row_P, token_P] += 1
        self._ids_SL[row_P, to_device(ends, torch.int64, row_P.device)] = token_P.int()
        for row in rows:
            self._num_ids[row] += 1

    def _make_room(self) -> None:
        preempted = [row for row, sequence in self._holders.items() if sequence.blocks is None]
        for row in preempted:
            self.release(row)
        if preempted:
            return
        before = len(self._counts_SV)
        assert before < self._most_rows, "a sequence that runs has one row"
        num_rows = min(self._most_rows, max(FIRST_ROWS, 2 * before))
        self._counts_SV = _enlarged(self._counts_SV, num_rows, self._counts_SV.shape[1])
        self._ids_SL = _enlarged(self._ids_SL, num_rows, self._ids_SL.shape[1])
        self._num_ids += [0] * (num_rows - before)
        self._free += range(before, num_rows)

    def _make_room_for_ids(self, num_ids: int) -> None:
        if num_ids > self._ids_SL.shape[1]:
            self._ids_SL = _enlarged(self._ids_SL, len(self._ids_SL), num_ids + num_ids // 2)

    def _fill(self, row: int, sequence: Sequence) -> None:
        """Fills a row with a sequence's tokens. Tokens of the prompt matter only to the repetition penalty."""
        device, first = self._counts_SV.device, sequence.num_prompt
        prompt = sequence.tokens[:first] if sequence.params.repetition_penalty != 1.0 else []
        prompt_ids = list(dict.fromkeys(prompt))
        ids = to_device(prompt_ids + sequence.tokens[first:], torch.int64, device)
        self._make_room_for_ids(len(ids))
        self._ids_SL[row].zero_()  # a wider vocabulary's ids must not stay behind
        self._ids_SL[row, : len(ids)] = ids.int()
        self._num_ids[row] = len(ids)
        count_V, answer = self._counts_SV[row].zero_(), ids[len(prompt_ids) :]
        count_V.index_fill_(0, ids[: len(prompt_ids)], IN_PROMPT)
        count_V.scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))


def _enlarged(before: Tensor, num_rows: int, num_columns: int) -> Tensor:
    after = before.new_zeros((num_rows, num_columns))
    after[: before.shape[0], : before.shape[1]] = before
    return after
