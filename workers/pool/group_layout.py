"""Divides the blocks of a KV cache into groups whose memory consists of whole pages, so that it can be lent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = 2 << 20  # Smallest memory of a GPU that can be mapped.


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The groups of one KV cache, which has a tensor for each layer's keys and one for its values.

    The first group and the last one are never lent: block tables that are padded with 0 name the first block, and the
    last block is for the padding of captured steps.
    """

    blocks: int  # KV blocks of a group. They are consecutive.
    part_bytes: tuple[int, ...]  # Bytes of a group in each tensor, a multiple of PAGE_BYTES.
    num_groups: int  # All of them, lendable or not.

    @classmethod
    def of(cls, block_bytes: Sequence[int], most_blocks: int) -> GroupLayout:
        """Returns the layout with as many groups as fit.

        Args:
            block_bytes: Bytes of a KV block in each tensor.
            most_blocks: Largest number of blocks, with the one for padding.
        """
        blocks = math.lcm(*(PAGE_BYTES // math.gcd(size, PAGE_BYTES) for size in block_bytes))
        return cls(blocks, tuple(size * blocks for size in block_bytes), most_blocks // blocks)

    @property
    def group_bytes(self) -> int:
        """Bytes of a group in all tensors."""
        return sum(self.part_bytes)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, with the one for padding."""
        return self.num_groups * self.blocks

    def first_lendable(self, num_lendable: int) -> int:
        """Returns the first of so many lendable groups. They are the last ones, since blocks are used from the
        first."""
        return self.num_groups - 1 - num_lendable

    def most_lendable(self, kept_blocks: int) -> int:
        """Returns how many groups can be lent if `kept_blocks` blocks must remain, besides the one for padding."""
        return max(0, min(self.num_groups - 2, (self.num_blocks - 1 - kept_blocks) // self.blocks))
