"""Gives each running sequence the slots in which recurrent layers hold its state (workers/device/state_cache.py)."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many

from lorafleet.workers.schedule.sequence import Sequence
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

    def release(self, sequence: Sequence) -> None:
        """Takes back all slots of a sequence."""
        if sequence.state_slot is not None:
            self.give_back(sequence.state_slot)
            self.give_back_drafts({*sequence.draft_slots, *sequence.state_ring} - {sequence.state_slot})
        sequence.state_slot, sequence.draft_slots, sequence.state_ring = None, [], []

    def go_behind(self, sequence: Sequence) -> None:
        """Prepares a sequence for its next step, if it has drafts in flight."""
        if sequence.draft_slots and sequence.state_slot is not None:
            sequence.state_ring, sequence.draft_slots = [*sequence.draft_slots, sequence.state_slot], []

    def draft(self, sequence: Sequence, count: int) -> int:
        """Gives the sequence slots for the states of a step with so many drafts. Returns the number of drafts for which
        there are some.

        Behind a step in flight, those of its states that are not needed are taken first.
        """
        in_ring = sequence.state_ring[:-1][:count]
        sequence.draft_slots = in_ring + self.take_for_drafts(count - len(in_ring))
        return len(sequence.draft_slots)

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """Records how many drafts of a step were accepted. The sequence goes on with the state behind them.

        A step behind was planned as if all were, with the slots of this one: its last state is in the last of them, and
        the others are for the new states. For each draft that is wrong, the device took the slot before, and the last
        one in place of the first. So no step overwrites the state from which it goes on.
        """
        if sequence.state_slot is None:
            return
        ring = sequence.state_ring
        if not ring:
            ring, sequence.draft_slots = [*sequence.draft_slots, sequence.state_slot], []
        num_wrong = len(ring) - 1 - num_accepted
        slot_by_planned = {slot: ring[place - num_wrong] for place, slot in enumerate(ring)}
        sequence.state_slot = slot_by_planned[sequence.state_slot]
        sequence.draft_slots = [slot_by_planned.get(slot, slot) for slot in sequence.draft_slots]
        sequence.state_ring = []
        self.give_back_drafts(set(ring) - {sequence.state_slot, *sequence.draft_slots})
