"""Copies KV blocks of many caches to rows, or back, in one launch. kernels/decoder/block_copies.py has the twins.

Idea: a program copies BLOCK words of 4 bytes of one block of one cache. Caches differ in size, so the grid is as large
as the largest needs, and programs beyond the end of a smaller block return at once.

Memory: a table [X, 3] has each cache's address, the words of a block, and the word of a row at which they begin.
"""

# X caches · N KV blocks · R rows · B bytes of a row

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK = 4096
WORD_BYTES = 4
ALIGNED_WORDS = 4  # words that a thread moves at once where all blocks begin at multiples of 16 bytes


@jit()
def _copy_kernel(
    table_ptr: tl.tensor,
    block_ptr: tl.tensor,
    row_ptr: tl.tensor,
    row_words: tl.tensor,
    to_rows: tl.constexpr,
    aligned: tl.constexpr,
    multiple: tl.constexpr,
    block: tl.constexpr,
) -> None:
    cache = tl.program_id(2)
    num_words = tl.load(table_ptr + 3 * cache + 1)
    first = tl.program_id(0) * block
    if first < num_words:
        row = tl.program_id(1)
        words = tl.load(table_ptr + 3 * cache).to(tl.pointer_type(tl.int32))
        start = tl.load(table_ptr + 3 * cache + 2)
        if aligned:
            num_words = tl.multiple_of(num_words, multiple)
            words = tl.multiple_of(words, 4 * multiple)
            start = tl.multiple_of(start, multiple)
        offset = first + tl.arange(0, block)
        inside = offset < num_words
        in_cache = words + tl.load(block_ptr + row).to(tl.int64) * num_words + offset
        in_row = row_ptr + row.to(tl.int64) * row_words + start + offset
        if to_rows:
            tl.store(in_row, tl.load(in_cache, mask=inside), mask=inside)
        else:
            tl.store(in_cache, tl.load(in_row, mask=inside), mask=inside)


class BlockAddresses:
    """The addresses of caches on a GPU."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        sizes = [cache[0].nbytes for cache in caches]
        assert all(size % WORD_BYTES == 0 for size in sizes)
        words = [size // WORD_BYTES for size in sizes]
        starts = [0, *accumulate(words)]
        self._caches = caches  # so that the addresses stay theirs
        self._most_words = max(words)
        addresses = [cache.data_ptr() for cache in caches]
        self._aligned = all(number % ALIGNED_WORDS == 0 for number in words) and all(at % 16 == 0 for at in addresses)
        rows = list(zip(addresses, words, starts[:-1], strict=True))
        self._table = torch.tensor(rows, dtype=torch.int64, device=caches[0].device)

    def copy(self, blocks: Sequence[int], rows_RB: Tensor, *, to_rows: bool) -> None:
        """Queues the copies on the current stream. Rows begin at multiples of 16 bytes."""
        assert rows_RB.is_contiguous() and rows_RB.shape[1] % (WORD_BYTES * ALIGNED_WORDS) == 0
        host = torch.tensor(blocks, dtype=torch.int32, pin_memory=self._table.is_cuda)
        on_device = host.to(self._table.device, non_blocking=True)
        grid = triton.cdiv(self._most_words, BLOCK), len(blocks), len(self._caches)
        _copy_kernel[grid](
            self._table,
            on_device,
            rows_RB.view(torch.int32),
            rows_RB.shape[1] // WORD_BYTES,
            to_rows=to_rows,
            aligned=self._aligned,
            multiple=ALIGNED_WORDS,
            block=BLOCK,
            num_warps=8,
        )
