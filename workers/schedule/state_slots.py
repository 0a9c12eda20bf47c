"""Gives each running sequence the slot in which recurrent layers hold its state (workers/device/state_cache.py)."""

from __future__ import annotations

from lorafleet.workers.schedule.state_snapshots import StateSnapshots


class StateSlots:
    """The free slots of recurrent states. There are as many slots as sequences that may run, so one is always free.

    Args:
        snapshots: None if the prefix cache is off.
    """

    def __init__(self, max_num_seqs: int, snapshots: StateSnapshots | None = None) -> None:
        self.snapshots = snapshots
        self._free = list(range(max_num_seqs))[::-1]

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert slot not in self._free
        self._free.append(slot)
