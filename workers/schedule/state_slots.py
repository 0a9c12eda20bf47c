"""Gives each running sequence the slots in which recurrent layers hold its state (workers/device/state_cache.py)."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many

from lorafleet.workers.schedule.state_snapshots import StateSnapshots


class StateSlots:
    """The free slots of recurrent states. There are as many slots as sequences that may run, so one is always free.
    Those for drafts come besides.

    Args:
        snapshots: None if the prefix cache is off.
    """

    def __init__(self, max_num_seqs: int, snapshots: StateSnapshots | None = None, draft_slots: Many[int] = ()) -> None:
        self.snapshots = snapshots
        self._free: list[int] = [*range(max_num_seqs), *draft_slots][::-1]
        self._num_drafts_left = len(draft_slots)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)

    def take_for_drafts(self, count: int) -> list[int]:
        """Returns so many slots, or as many as are left for drafts."""
        count = min(count, self._num_drafts_left)
        self._num_drafts_left -= count
        return [self._free.pop() for _ in range(count)]

    def give_back_drafts(self, slots: Collection[int]) -> None:
        """Takes back what take_for_drafts() has given, where a sequence may have exchanged one for its own slot."""
        for slot in slots:
            self.give_back(slot)
        self._num_drafts_left += len(slots)
