"""Tells the recurrent kernels which tokens of a step belong to which sequence, and where the sequences' states are.

A state slot is an index into the states of every recurrent layer. A sequence has the same slot in all of them.
"""

# T tokens of the step · B sequences · L sequences that are computed by chunks · C their chunks

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # Tokens that are computed together.
FEW_TOKENS = 16  # Up to this many tokens of a sequence are computed one after another.
NOT_KEPT = -1


class LongSequences(NamedTuple):
    """The sequences that have more than FEW_TOKENS tokens in a step, and their chunks. All tensors are int32."""

    index_L: Tensor  # Index of the sequence in the batch.
    first_chunk_L: Tensor  # Index of its first chunk; its others follow.
    row_C: Tensor  # First token of the chunk.
    end_C: Tensor  # One more than the last token of the chunk's sequence.


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """The sequences of a step, in the order of their tokens. The tensors are views of one int32 buffer."""

    query_lens: list[int]  # Tokens that each sequence computes now. They sum to T.
    slot_B: Tensor  # State slot of each sequence.
    is_new_B: Tensor  # 1 if the sequence begins with this step, so that its state is zero before it; else 0.
    start_B: Tensor  # Index of each sequence's first token. It has B + 1 elements, of which the last is T.
    sequence_T: Tensor  # Sequence of each token.
    long: LongSequences | None  # None without any.
    # Slot to which the state behind each token is written too, or NOT_KEPT; None if none is. No sequence of the batch
    # has such a slot, and sequences with one have at most FEW_TOKENS tokens.
    kept_T: Tensor | None = None
    kept: Sequence[int] = ()  # The same on the host.
    numbers: Tensor | None = None  # The buffer, in the order of the fields: slot_B first.

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        slots: Sequence[int],
        is_new: Sequence[bool],
        device: torch.device,
        kept: Sequence[int] = (),
    ) -> RecurrentBatch:
        """Builds the batch with one copy, which does not wait for the device. `kept` has an element for each token, or
        none."""
        num_seqs = len(query_lens)
        assert num_seqs == len(slots) == len(is_new)
        assert len(kept) in (0, sum(query_lens))
        starts = [0, *accumulate(query_lens)]
        sequences = [b for b, count in enumerate(query_lens) for _ in range(count)]
        chunks = _chunks(query_lens, starts)
        is_cuda = device.type == "cuda"
        values = [*slots, *map(int, is_new), *starts, *sequences, *kept, *(value for part in chunks for value in part)]
        host = torch.tensor(values, dtype=torch.int32, pin_memory=is_cuda)
        memory = host.to(device, non_blocking=True)
        sizes = [num_seqs, num_seqs, num_seqs + 1, starts[-1], len(kept), *map(len, chunks)]
        slot_B, is_new_B, start_B, sequence_T, kept_T, *parts = memory.split(sizes)
        long = LongSequences(*parts) if chunks[0] else None
        return cls(
            list(query_lens), slot_B, is_new_B, start_B, sequence_T, long, kept_T if kept else None, kept, memory
        )

    @classmethod
    def of_drafts(cls, num_rows: int, num_seqs: int, padding_slot: int, device: torch.device) -> RecurrentBatch:
        """Builds a batch of at most so many rows and sequences that may have drafts, for a captured step and refill().
        It has more sequences, for the rows that no sequence has."""
        lens = [0] * num_seqs + _pieces(num_rows)
        count = len(lens)
        return cls.build(lens, [padding_slot] * count, [True] * count, device, [NOT_KEPT] * num_rows)

    def refill(
        self,
        query_lens: Sequence[int],
        slots: Sequence[int],
        is_new: Sequence[bool],
        padding_slot: int,
        kept: Sequence[int] = (),
    ) -> None:
        """Replaces the sequences of a captured step in place, by one copy. Rows without a sequence get `padding_slot`.

        In a batch of one token for each sequence, the sequences keep their rows. The arguments are as in build(), and
        `query_lens` and `kept` on the host keep what the batch was built with.
        """
        assert self.numbers is not None
        padding = len(self.slot_B) - len(slots)
        values = [*slots, *[padding_slot] * padding, *map(int, is_new), *[1] * padding]
        if self.kept_T is not None:
            num_left = len(self.sequence_T) - sum(query_lens)
            pieces = _pieces(num_left)
            lens = [*query_lens, *pieces, *[0] * (padding - len(pieces))]
            sequences = [b for b, count in enumerate(lens) for _ in range(count)]
            values += [*accumulate(lens, initial=0), *sequences, *(kept or [NOT_KEPT] * sum(query_lens))]
            values += [NOT_KEPT] * num_left
        host = torch.tensor(values, dtype=torch.int32, pin_memory=self.numbers.is_cuda)
        self.numbers[: len(values)].copy_(host, non_blocking=True)

    def correct(self, slot_N: Tensor, num_seqs: int) -> None:
        """Queues other slots for the first sequences of a captured step after refill(). The host need not know them.

        Args:
            slot_N: The slots of so many sequences, int64, and then the kept ones of the first tokens, or none.
        """
        self.slot_B[:num_seqs].copy_(slot_N[:num_seqs])
        if self.kept_T is not None:
            self.kept_T[: len(slot_N) - num_seqs].copy_(slot_N[num_seqs:])

    def read(self, state_S: Tensor, sequences: slice | Tensor = slice(None)) -> Tensor:
        """Returns a copy of the states [B, ...] of these sequences, which are zero where a sequence begins."""
        found_B = state_S[self.slot_B[sequences].long()]
        is_new_B = self.is_new_B[sequences].view(-1, *[1] * (state_S.dim() - 1))
        return found_B.masked_fill_(is_new_B > 0, 0)

    def write(self, state_S: Tensor, values_B: Tensor, sequences: slice | Tensor = slice(None)) -> None:
        state_S[self.slot_B[sequences].long()] = values_B.to(state_S.dtype)

    def keeps(self, span: slice) -> bool:
        """Returns whether the state behind a token of these rows is written to a slot of kept_T."""
        return any(slot != NOT_KEPT for slot in self.kept[span])

    def keep(self, state_S: Tensor, rows: Iterable[int], values_N: Tensor) -> None:
        """Writes the states behind the tokens of these rows to their slots in kept_T."""
        if self.kept:
            for row, value in zip(rows, values_N, strict=True):
                if self.kept[row] != NOT_KEPT:
                    state_S[self.kept[row]] = value.to(state_S.dtype)

    def singles(self) -> list[int]:
        """Returns the sequences that compute one token."""
        return [b for b, count in enumerate(self.query_lens) if count == 1]

    def spans(self) -> list[tuple[int, slice]]:
        """Returns each sequence that computes several tokens, with their places in the step."""
        starts = accumulate(self.query_lens, initial=0)
        pairs = enumerate(zip(starts, self.query_lens, strict=False))
        return [(b, slice(start, start + count)) for b, (start, count) in pairs if count > 1]


def _pieces(num_rows: int) -> list[int]:
    """Divides rows among sequences that are computed token by token."""
    whole, rest = divmod(num_rows, FEW_TOKENS)
    return [FEW_TOKENS] * whole + [rest] * (rest > 0)


def _chunks(query_lens: Sequence[int], starts: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns the values of LongSequences."""
    index: list[int] = []
    first_chunk: list[int] = []
    row: list[int] = []
    end: list[int] = []
    for b, count in enumerate(query_lens):
        if count > FEW_TOKENS:
            index.append(b)
            first_chunk.append(len(row))
            rows = range(starts[b], starts[b + 1], CHUNK)
            row.extend(rows)
            end.extend([starts[b + 1]] * len(rows))
    return index, first_chunk, row, end
