"""Tells attention kernels where the keys of a step's sequences lie, with one copy of block numbers and lengths.

FlashInfer's wrappers take the blocks of all sequences in one row. Its XQA kernels take a table with a row for each
sequence, which is made on the device.
"""

# B sequences · M their KV blocks in all · W width of a table, in blocks

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import AttentionBatch

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class KVPages:
    """The places of a step's keys, as views of one int32 buffer on the host or the device, which one copy moves."""

    def __init__(self, memory: Tensor, num_seqs: int) -> None:
        self.memory = memory
        self.starts = memory[: num_seqs + 1]  # [B + 1]: where each sequence's blocks begin, and M at the end
        self.last_lens = memory[num_seqs + 1 : 2 * num_seqs + 1]  # [B]: tokens in each sequence's last block
        self.lens = memory[2 * num_seqs + 1 : 3 * num_seqs + 1]  # [B]: tokens of each sequence
        self.blocks = memory[3 * num_seqs + 1 :]  # [M]

    @staticmethod
    def size(num_seqs: int, num_blocks: int) -> int:
        return 3 * num_seqs + 1 + num_blocks

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int) -> KVPages:
        """Builds the pages of a batch in pinned memory."""
        lens_B = np.array(batch.context_lens, dtype=np.int32)
        counts_B = -(-lens_B // block_size)
        blocks = join_blocks(batch.block_tables, counts_B.tolist())
        last_lens_B = lens_B - (counts_B - 1) * block_size
        packed = np.concatenate((running_sums(counts_B), last_lens_B, lens_B, blocks))
        return cls(pinned_copy(packed), len(lens_B))


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Each sequence's blocks and length on the device, as XQA takes them."""

    lens_B: Tensor  # int32
    blocks_BW: Tensor  # int32; what lies behind a sequence's blocks is any block of the batch, or of an earlier one

    @classmethod
    def within(cls, memory: Tensor, num_seqs: int, width: int) -> BlockTables:
        """Returns tables in fixed memory, which has at least KVPages.size(num_seqs, num_seqs * width) elements."""
        lens_B, blocks = memory[:num_seqs], memory[num_seqs : num_seqs * (width + 1)]
        return cls(lens_B, blocks.view(num_seqs, width))

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int, device: torch.device) -> BlockTables:
        """Builds the tables of a batch without waiting for the device."""
        host = KVPages.of(batch, block_size)
        num_seqs = len(batch.context_lens)
        pages = KVPages(host.memory.to(device, non_blocking=True), num_seqs)
        width = -(-max(batch.context_lens) // block_size)
        columns_W = torch.arange(width, dtype=torch.int32, device=device)
        # Short sequences read on into their neighbors' blocks, and the last ones must not read past the end.
        index_BW = (pages.starts[:-1, None] + columns_W).clamp_(max=len(pages.blocks) - 1)
        return cls(pages.lens, pages.blocks.index_select(0, index_BW.view(-1)).view(num_seqs, width))

    def assign(self, other: BlockTables) -> None:
        """Copies a batch's tables into these, which may be wider."""
        self.lens_B.copy_(other.lens_B)
        self.blocks_BW[:, : other.blocks_BW.shape[1]].copy_(other.blocks_BW)


def running_sums(counts_B: Ints) -> Ints:
    """Returns the running sums from 0 on, such as [0, 2, 5] for [2, 3]."""
    starts = np.zeros(len(counts_B) + 1, dtype=np.int32)
    counts_B.cumsum(out=starts[1:])
    return starts


def pinned_copy(values: Ints) -> Tensor:
    """Copies the values to pinned memory. torch tracks the copies from it and reuses it when they are done."""
    pinned = torch.empty(len(values), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    pinned.numpy()[:] = values
    return pinned


def join_blocks(tables: Sequence[Sequence[int]], counts: list[int]) -> Ints:
    """Returns the first blocks of each table in one array. Tables that are int32 arrays of no more blocks, as those of
    decodes are, cost one memory copy each, and no Python integers."""
    if list(map(len, tables)) == counts and set(map(type, tables)) == {array}:
        return np.frombuffer(b"".join(tables), np.int32)  # type: ignore[arg-type]  # as has been checked
    return np.frombuffer(
        b"".join([array("i", table[:count]) for table, count in zip(tables, counts, strict=True)]), np.int32
    )
