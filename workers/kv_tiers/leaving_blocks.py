"""Copies KV blocks to the host tier after the prefix cache has forgotten them, and before a step overwrites them.

A sequence gets blocks for all of its tokens at once, and overwrites them step by step. So a forgotten block has its
content for a while. It is copied before the step that writes to it, or earlier if few blocks are urgent. The same is
done for snapshots of states, whose slots are the blocks then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from lorafleet.workers.kv_tiers.stored_blocks import StoredBlocks
from lorafleet.workers.kv_tiers.tier_counts import TierCounts
from lorafleet.workers.kv_tiers.tier_orders import TierOrders
from lorafleet.workers.schedule.sequence import Chunk


class LeavingBlocks:
    """The forgotten blocks of one engine that are not copied yet.

    Args:
        num_ahead: Number of blocks that are copied at each step, if not more are urgent.
    """

    def __init__(
        self,
        stored: StoredBlocks,
        orders: TierOrders,
        counts: TierCounts,
        num_ahead: int,
    ) -> None:
        self._stored = stored
        self._orders = orders
        self._counts = counts
        self._num_ahead = num_ahead
        self._leaving: dict[int, bytes] = {}  # The name of each block, in the order in which they were forgotten.

    def leave(self, name: bytes, block: int) -> None:
        """Records that nobody finds a block on the GPU any more. Its content is still there."""
        stored = self._stored.find(name)
        if stored is not None:
            self._stored.touch(stored)
        else:
            self._leaving[block] = name

    def before_step(self, written: Iterable[int]) -> None:
        """Orders the copies of the blocks that the next step writes to, and of some others."""
        if not self._leaving:
            return
        urgent = [block for block in written if block in self._leaving]
        self.save(urgent)
        self.save(list(islice(self._leaving, max(0, self._num_ahead - len(urgent)))))

    def save(self, blocks: Iterable[int]) -> None:
        """Orders the copies of those blocks that are leaving."""
        pairs: list[tuple[int, int]] = []
        for block in blocks:
            name = self._leaving.pop(block, None)
            if name is None or self._stored.find(name) is not None:
                continue
            slot = self._stored.reserve_host()
            if slot is None:
                self._counts.lost_blocks["no_room"] += 1
                continue
            self._stored.store(name, slot)
            pairs.append((block, slot))
        if pairs:
            self._counts.moved_blocks["gpu_to_host"] += len(pairs)
            self._orders.save(pairs)

    def save_all(self) -> None:
        """Orders the copies of all blocks that are leaving, before the GPU's memory is given back."""
        self.save(list(self._leaving))

    def clear(self) -> None:
        self._leaving.clear()


def written_blocks(chunks: Sequence[Chunk], block_size: int) -> Iterator[int]:
    """Yields the KV blocks that the step of these chunks writes to, however many drafts in flight are accepted."""
    for chunk in chunks:
        blocks, start = chunk.sequence.blocks, chunk.sequence.num_computed
        end = start + chunk.sequence.num_unverified + chunk.num_tokens
        if blocks is not None:
            yield from blocks.table[start // block_size : (end - 1) // block_size + 1]
