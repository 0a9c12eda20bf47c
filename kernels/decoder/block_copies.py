"""Copies KV blocks between the caches of all layers and rows that hold one block each, as lower tiers store them.

A row has the bytes of one block in every cache, in the order of the caches. On CUDA each direction is one launch of
kernels/decoder/block_copies_triton.py.
"""

# N KV blocks · R rows · B bytes of a row

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lorafleet.kernels.decoder.block_copies_triton import BlockAddresses


class BlockCopies:
    """The caches whose blocks are copied. They are contiguous, [N, ...] of any dtypes."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        assert caches and all(cache.is_contiguous() for cache in caches)
        self.row_bytes = sum(cache[0].nbytes for cache in caches)  # A row may be longer than that.
        self._caches = list(caches)
        self._on_device: BlockAddresses | None = None
        self.find_addresses()

    def find_addresses(self) -> None:
        """Must be called again after the caches have got other memory."""
        if self._caches[0].is_cuda:
            from lorafleet.kernels.decoder.block_copies_triton import BlockAddresses  # triton is optional on a CPU

            self._on_device = BlockAddresses(self._caches)

    def to_rows(self, blocks: Sequence[int], rows_RB: Tensor) -> None:
        """Copies each block to the row of its place in the list. rows_RB is uint8, on the device of the caches."""
        if self._on_device is not None:
            self._on_device.copy(blocks, rows_RB, to_rows=True)
        else:
            blocks_to_rows_torch(self._caches, blocks, rows_RB)

    def from_rows(self, rows_RB: Tensor, blocks: Sequence[int]) -> None:
        """Copies rows to the blocks in the list, of which none is there twice."""
        if self._on_device is not None:
            self._on_device.copy(blocks, rows_RB, to_rows=False)
        else:
            rows_to_blocks_torch(self._caches, rows_RB, blocks)


def blocks_to_rows_torch(caches: Sequence[Tensor], blocks: Sequence[int], rows_RB: Tensor) -> None:
    start = 0
    for cache in caches:
        bytes_NB = cache.view(len(cache), -1).view(torch.uint8)
        for row, block in enumerate(blocks):
            rows_RB[row, start : start + bytes_NB.shape[1]] = bytes_NB[block]
        start += bytes_NB.shape[1]


def rows_to_blocks_torch(caches: Sequence[Tensor], rows_RB: Tensor, blocks: Sequence[int]) -> None:
    start = 0
    for cache in caches:
        bytes_NB = cache.view(len(cache), -1).view(torch.uint8)
        for row, block in enumerate(blocks):
            bytes_NB[block] = rows_RB[row, start : start + bytes_NB.shape[1]]
        start += bytes_NB.shape[1]
