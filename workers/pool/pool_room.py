"""Gets room for adapters from memory that they share with KV blocks, and says which of them leave if it goes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from lorafleet.workers.pool.memory_pool import MemoryPool, PoolCounts
from lorafleet.workers.pool.pool_cost import RecentRequests, worth_of_adapter
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.slots.slot_policy import Slot, SlotPolicy
from lorafleet.workers.slots.slot_room import SlotRoom


class PoolRoom:
    """The adapters' side of a pool.

    Args:
        evict: Empties an idle slot for lack of room.
    """

    def __init__(
        self,
        pool: MemoryPool,
        requests: RecentRequests,
        policy: SlotPolicy,
        room: SlotRoom,
        evict: Callable[[Slot], None],
    ) -> None:
        self.wanted: frozenset[str] = frozenset()  # Digests that waiting requests need.
        self._pool = pool
        self._requests = requests
        self._policy = policy
        self._room = room
        self._evict = evict

    def waits(
        self, adapter: PackedAdapter, slot: Slot, tenant: str, wanted: Sequence[str], keep: Collection[str]
    ) -> bool:
        """Returns whether the adapter should wait for memory that is on its way, rather than that others leave for it.

        The arguments are as in SlotRoom.to_empty().
        """
        missing = self._room.lacks(adapter, slot)
        if not missing:
            return False
        victims = self._room.to_empty(adapter, slot, wanted, keep, tenant)
        return self._pool.bring(missing, None if victims is None else self._worth(victims))

    @property
    def is_bringing(self) -> bool:
        """Whether memory is on its way to adapters."""
        return self._pool.is_bringing

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that no sequence can get; 0 if the KV cache has all of its memory."""
        return self._pool.num_blocks

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of the KV cache that adapters have, or that are on their way to them or back."""
        return self._pool.borrowed_bytes

    @property
    def counts(self) -> PoolCounts:
        return self._pool.counts

    def count(self, digest: str, adapter: PackedAdapter | None) -> None:
        """Counts a request for an adapter, which is given if it is in host memory."""
        self._requests.count(digest, None if adapter is None else adapter.cuts[-1])

    def advance(self) -> None:
        """Must be called before each step is scheduled."""
        self._pool.advance(self)

    def recall(self) -> None:
        """Gives back all borrowed memory, while all slots are empty. Call it at each step until num_blocks is 0."""
        self._pool.recall()

    def close(self) -> None:
        self._pool.close()

    def worths(self, start: int, num_bytes: int) -> dict[int, float]:
        """Returns what RegionUsers.worths does."""
        worths: dict[int, float] = {}
        for slot in self._policy.slots:
            regions = {
                region
                for extent in slot.extents
                for region in range(
                    (extent.start - start) // num_bytes, (extent.start + extent.num_bytes - 1 - start) // num_bytes + 1
                )
            }
            if regions:
                may_leave = slot.is_idle and slot.is_ready and slot.digest not in self.wanted
                worth = self._worth([slot]) if may_leave else math.inf
                for region in regions:
                    worths[region] = worths.get(region, 0.0) + worth
        return worths

    def leave(self, start: int, num_bytes: int) -> None:
        """Does what RegionUsers.leave does."""
        for slot in self._policy.slots:
            if any(e.start < start + num_bytes and start < e.start + e.num_bytes for e in slot.extents):
                self._evict(slot)

    def _worth(self, slots: Iterable[Slot]) -> float:
        adapters = [slot.adapter for slot in slots if slot.adapter is not None]
        return sum(
            worth_of_adapter(self._requests.per_s(adapter.info.digest), adapter.cuts[-1]) for adapter in adapters
        )
