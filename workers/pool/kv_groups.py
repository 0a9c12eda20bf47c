"""Takes groups of KV blocks out of the prefix cache, so that their memory can be lent, and puts them back.

A group is closed first. Its free blocks are forgotten, and nobody gets them any more. Blocks of running sequences are
not touched: the group is left once these have ended. It is usually chosen so that there are none.
"""

# N KV blocks · G lendable groups

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lorafleet.workers.pool.group_layout import GroupLayout
from lorafleet.workers.pool.pool_cost import RETURN_S, AdapterUse, PoolCosts
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence_memory import SPARE_SHARE

SHORTLIST = 8  # Number of groups whose worth is computed exactly, since that takes a look at each block.


class KVGroups:
    """The lendable groups of one KV cache.

    Args:
        uses: Returns the use of the adapter with this digest, or None for "", which is the base.
    """

    def __init__(
        self, kv: KVCacheManager, layout: GroupLayout, num_lendable: int, uses: Callable[[str], AdapterUse | None]
    ) -> None:
        self.num_lendable = num_lendable
        self._kv = kv
        self._size = layout.blocks
        self._first = layout.first_lendable(num_lendable)
        self._uses = uses
        self._closed: set[int] = set()
        self._num_forgotten = kv.num_forgotten

    @property
    def num_blocks(self) -> int:
        """Number of blocks whose memory is lent, or is about to be."""
        return len(self._closed) * self._size

    @property
    def num_spare(self) -> int:
        """Number of groups that could leave without making sequences wait for blocks; negative if they wait."""
        return (self._kv.num_free - self._kv.num_blocks // SPARE_SHARE) // self._size

    def cheapest(self, num_groups: int, costs: PoolCosts, now_s: float) -> list[tuple[float, int]]:
        """Returns (worth, group) of the open groups of the least worth that no sequence uses, at most so many."""
        unused_G = ~self._by_group(self._kv.users() > 0).any(axis=1)
        since_GN = self._by_group(self._kv.idle_since())
        roughly_G = np.where(since_GN > 0, 1 / (now_s - since_GN + RETURN_S), 0.0).sum(axis=1)
        open_ = [i for i in np.flatnonzero(unused_G).tolist() if i + self._first not in self._closed]
        shortlist = sorted(open_, key=roughly_G.__getitem__)[: SHORTLIST + num_groups]
        worths = [
            (self._worth(self._blocks(i + self._first), since_GN[i].tolist(), costs, now_s), i + self._first)
            for i in shortlist
        ]
        return sorted(worths)[:num_groups]

    def least_used(self) -> int | None:
        """Returns the open group with the fewest blocks in use, or None if there is none."""
        used_G = self._by_group(self._kv.users() > 0).sum(axis=1)
        open_ = [i for i in range(self.num_lendable) if i + self._first not in self._closed]
        return min(open_, key=used_G.__getitem__) + self._first if open_ else None

    def worth_of_shortage(self, costs: PoolCosts, now_s: float) -> float:
        """Returns what one more group would be worth to the KV cache.

        It is 0 if the cache has forgotten nothing since the last call. Otherwise it is the worth of the blocks that it
        forgets next. Blocks that sequences lack count like some that have just been used.
        """
        num_forgotten, self._num_forgotten = self._num_forgotten, self._kv.num_forgotten
        if self.num_spare < 0:
            return costs.worth_of_block(0.0) * self._size
        blocks = self._kv.next_to_leave(self._size)
        if num_forgotten == self._num_forgotten or len(blocks) < self._size:
            return 0.0
        return self._worth(blocks, [self._kv.idle_since_of(block) for block in blocks], costs, now_s)

    def close(self, group: int) -> None:
        """Withholds an open group's blocks from sequences, except from those that use them already."""
        self._closed.add(group)
        num_forgotten = self._kv.num_forgotten
        self._kv.withhold(self._blocks(group))
        self._num_forgotten += self._kv.num_forgotten - num_forgotten

    def is_left(self, group: int) -> bool:
        """Returns whether no sequence uses a closed group any more."""
        return self._kv.are_left(self._blocks(group))

    def forget(self, group: int) -> range:
        """Forgets what is left of the content of a closed group. Returns its blocks."""
        num_forgotten = self._kv.num_forgotten
        self._kv.forget(self._blocks(group))
        self._num_forgotten += self._kv.num_forgotten - num_forgotten
        return self._blocks(group)

    def open(self, group: int) -> None:
        """Lets sequences use a closed group again."""
        self._closed.remove(group)
        self._kv.let_go(self._blocks(group))

    def _worth(self, blocks: range | list[int], since_N: list[float], costs: PoolCosts, now_s: float) -> float:
        """Returns the worth of the content of these blocks.

        Args:
            since_N: The time since which each is idle; 0 if it holds nothing.
        """
        uses: dict[str, AdapterUse | None] = {}
        worth = 0.0
        for block, since_s in zip(blocks, since_N, strict=True):
            if since_s:
                digest = self._digest(block)
                if digest not in uses:
                    uses[digest] = self._uses(digest)
                worth += costs.worth_of_block(now_s - since_s, uses[digest])
        return worth

    def _digest(self, block: int) -> str:
        salt = self._kv.salt_of_content(block)
        return salt[1] if isinstance(salt, tuple) else ""

    def _blocks(self, group: int) -> range:
        return range(group * self._size, (group + 1) * self._size)

    def _by_group(self, values_N: np.ndarray) -> np.ndarray:
        """Returns the values of the blocks of lendable groups, [G, blocks of a group]."""
        first = self._first * self._size
        return values_N[first : first + self.num_lendable * self._size].reshape(self.num_lendable, self._size)
