"""Copies slots of many states in one launch. kernels/recurrent/slot_copies.py has its twin.

Idea: a program copies BLOCK words of 4 bytes of one slot of one state. States differ in size, so the grid is as large
as the largest needs, and programs beyond the end of a smaller state return at once.

Memory: a table [X, 2] has each state's address and the words of a slot. The pairs are [P, 2].
"""

# X states · S slots · N numbers of a state · P pairs of slots

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK = 4096
WORD_BYTES = 4
ALIGNED_WORDS = 4  # words that a thread loads at once where all slots begin at multiples of 16 bytes


@jit()
def _copy_kernel(
    table_ptr: tl.tensor, pair_ptr: tl.tensor, aligned: tl.constexpr, multiple: tl.constexpr, block: tl.constexpr
) -> None:
    state = tl.program_id(2)
    num_words = tl.load(table_ptr + 2 * state + 1)
    first = tl.program_id(0) * block
    if first < num_words:
        pair = tl.program_id(1)
        words = tl.load(table_ptr + 2 * state).to(tl.pointer_type(tl.int32))
        if aligned:
            num_words = tl.multiple_of(num_words, multiple)
            words = tl.multiple_of(words, 4 * multiple)
        source = tl.load(pair_ptr + 2 * pair).to(tl.int64) * num_words
        target = tl.load(pair_ptr + 2 * pair + 1).to(tl.int64) * num_words
        offset = first + tl.arange(0, block)
        inside = offset < num_words
        tl.store(words + target + offset, tl.load(words + source + offset, mask=inside), mask=inside)


class SlotAddresses:
    """The addresses of states on a GPU."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        sizes = [state_SN[0].nbytes for state_SN in states]
        assert all(size % WORD_BYTES == 0 for size in sizes)
        rows = [(state_SN.data_ptr(), size // WORD_BYTES) for state_SN, size in zip(states, sizes, strict=True)]
        self._states = states  # so that the addresses stay theirs
        self._most_words = max(num_words for _, num_words in rows)
        self._aligned = all(number % ALIGNED_WORDS == 0 for _, number in rows) and all(at % 16 == 0 for at, _ in rows)
        self._table = torch.tensor(rows, dtype=torch.int64, device=states[0].device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        host = torch.tensor(pairs, dtype=torch.int32, pin_memory=self._table.is_cuda)
        on_device = host.to(self._table.device, non_blocking=True)
        grid = triton.cdiv(self._most_words, BLOCK), len(pairs), len(self._states)
        _copy_kernel[grid](
            self._table, on_device, aligned=self._aligned, multiple=ALIGNED_WORDS, block=BLOCK, num_warps=8
        )
