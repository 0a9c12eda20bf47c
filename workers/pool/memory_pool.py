"""Shares a GPU's memory between KV blocks and adapters: decides which of them has to leave for the other.

All memory is the KV cache's at first, except for that of one adapter. An adapter that waits for room borrows groups of
KV blocks if they are worth less than the idle adapters that would leave for it (pool_cost.py). If the KV cache runs
short, the regions whose adapters are worth less than its blocks go back. Running sequences and adapters in use are
never touched.

It belongs to the engine loop, which calls advance() once a step. group_mover.py moves the memory beside the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from lorafleet.workers.pool.group_mover import GroupMove, GroupMover
from lorafleet.workers.pool.kv_groups import KVGroups
from lorafleet.workers.pool.pool_cost import PoolCosts, pays
from lorafleet.workers.slots.lora_memory import LoRAMemory

DECIDE_S = 0.05  # Time after a decision that nothing moves, since each looks at all blocks or slots.
CALM_S = 1.0  # Time after an adapter has borrowed memory in which none goes back.
PATIENCE_S = 5.0  # Time that a closed group may wait for its sequences before another is closed instead.


@dataclass(slots=True)
class PoolCounts:
    lent: int = 0  # Groups that were lent to adapters so far.
    returned: int = 0  # Groups that went back to the KV cache so far.


class RegionUsers(Protocol):
    """The adapters in their memory, which is cut into regions."""

    def worths(self, start: int, num_bytes: int) -> dict[int, float]:
        """Returns what is lost if each region is emptied, by its index. It is infinite for a region with an adapter
        that is in use, pinned or waited for. Regions without adapters are left out.

        Args:
            start: First byte of the first region.
            num_bytes: Bytes of each.
        """

    def leave(self, start: int, num_bytes: int) -> None:
        """Empties a range of their memory."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The sizes of one GPU's pool."""

    group_bytes: int
    own_bytes: int  # Bytes of the adapters' memory that are never the KV cache's.
    most_lent: int  # Number of groups that adapters may borrow at a time.
    promised: int  # Number of groups that they may borrow even if sequences wait for blocks then.


class MemoryPool:
    """The pool of one engine.

    Args:
        memory: The adapters' memory, which grows and shrinks.
        costs: Returns the present costs.
        leaving: Called with the blocks whose memory is about to leave, and whose content is still there.
    """

    def __init__(
        self,
        groups: KVGroups,
        memory: LoRAMemory,
        mover: GroupMover,
        sizes: PoolSizes,
        costs: Callable[[], PoolCosts],
        leaving: Callable[[Iterable[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = PoolCounts()
        self.sizes = sizes
        self._groups = groups
        self._memory = memory
        self._mover = mover
        self._costs = costs
        self._leaving = leaving
        self._clock = clock
        self._lent: dict[int, int] = {}  # Group by region, with those that are on their way in either direction.
        self._coming: set[int] = set()  # Regions that are on their way to adapters.
        self._going: set[int] = set()  # Regions that are on their way back.
        self._draining: tuple[int, float] | None = None  # A closed group that sequences use, and since when.
        self._lend_due_s = self._return_due_s = 0.0
        memory.most_bytes = sizes.own_bytes + sizes.most_lent * sizes.group_bytes

    @property
    def is_bringing(self) -> bool:
        """Whether memory is on its way to adapters."""
        return bool(self._coming)

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that no sequence can get, since their memory is lent or about to be."""
        return self._groups.num_blocks

    @property
    def borrowed_bytes(self) -> int:
        """Bytes of the groups that are lent, or on their way."""
        return len(self._lent) * self.sizes.group_bytes

    def bring(self, missing_bytes: int, lost: float | None) -> bool:
        """Returns whether an adapter that lacks this many bytes should wait for memory that is on its way.

        Args:
            lost: The worth of the idle adapters that would otherwise leave for it; None if they do not suffice.
        """
        needed = max(1, -(-missing_bytes // self.sizes.group_bytes)) - len(self._coming)
        if needed <= 0:
            return True
        now_s = self._clock()
        num_lent = len(self._lent) + needed
        if now_s < self._lend_due_s or num_lent > self.sizes.most_lent:
            return False
        if needed > self._groups.num_spare and num_lent > self.sizes.promised:
            return False
        found = self._groups.cheapest(needed, self._costs(), now_s)
        worth = sum(worth for worth, _ in found)
        if lost is not None and (len(found) < needed or not pays(lost, worth)):
            self._lend_due_s = now_s + DECIDE_S
            return False
        self._return_due_s = now_s + CALM_S
        if not found:
            self._lend_due_s = now_s + DECIDE_S
            self._drain(now_s)
            return False
        self._stop_draining()
        for _, group in found:
            self._groups.close(group)
            self._lend(group)
        return True

    def advance(self, users: RegionUsers) -> None:
        """Takes in the moves that have ended, and gives back what the KV cache needs more than adapters. Call it before
        each step is scheduled."""
        for move in self._mover.take_done():
            self._end(move)
        if self._draining is not None and self._groups.is_left(self._draining[0]):
            group, self._draining = self._draining[0], None
            self._lend(group)
        now_s = self._clock()
        if self._lent and now_s >= self._return_due_s and not self._coming:
            self._return_due_s = now_s + DECIDE_S
            wanted = self._groups.worth_of_shortage(self._costs(), now_s)
            if wanted:
                self._return_cheapest(users, wanted)

    def recall(self) -> None:
        """Gives back all that adapters have borrowed, which they do not use. Call it at each step until num_blocks is
        0."""
        self._stop_draining()
        for region in self._lent.keys() - self._coming - self._going:
            self._return(region)

    def close(self) -> None:
        self._mover.close()

    def _drain(self, now_s: float) -> None:
        """Closes the group that fewest sequences use, and gives up another one that has taken too long."""
        if self._draining is not None and now_s - self._draining[1] < PATIENCE_S:
            return
        group = self._groups.least_used()
        self._stop_draining()
        if group is not None:
            self._groups.close(group)
            self._draining = group, now_s

    def _stop_draining(self) -> None:
        if self._draining is not None:
            self._groups.open(self._draining[0])
            self._draining = None

    def _lend(self, group: int) -> None:
        """Begins to move a closed group that no sequence uses to adapters."""
        self._leaving(self._groups.forget(group))
        region = next(region for region in count() if region not in self._lent)
        self._lent[region] = group
        self._coming.add(region)
        self._mover.begin(GroupMove(group, region, to_adapters=True))

    def _return_cheapest(self, users: RegionUsers, wanted: float) -> None:
        """Gives back the region whose adapters are worth least, if that is little enough."""
        worths = users.worths(self.sizes.own_bytes, self.sizes.group_bytes)
        regions = self._lent.keys() - self._going
        region = min(regions, key=lambda region: worths.get(region, 0.0), default=None)
        if region is not None and pays(wanted, worths.get(region, 0.0)):
            users.leave(*self._range(region))
            self._return(region)

    def _return(self, region: int) -> None:
        self._memory.shrink(*self._range(region))
        self._going.add(region)
        self._mover.begin(GroupMove(self._lent[region], region, to_adapters=False))

    def _end(self, move: GroupMove) -> None:
        if move.to_adapters:
            self._coming.remove(move.region)
            self._memory.grow(*self._range(move.region))
            self.counts.lent += 1
        else:
            self._going.remove(move.region)
            self._groups.open(self._lent.pop(move.region))
            self.counts.returned += 1

    def _range(self, region: int) -> tuple[int, int]:
        """Returns the first byte and the number of bytes of a region in the adapters' memory."""
        return self.sizes.own_bytes + region * self.sizes.group_bytes, self.sizes.group_bytes
