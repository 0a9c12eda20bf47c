"""Decides which adapters leave their slots, so that another gets a slot and its bytes have room.

A plain adapter needs a slot and memory for A and B. One with extras needs memory for them as well. Idle slots are
emptied for it. If those in use take too much, some of them drain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lorafleet.workers.slots.slot_policy import Slot, SlotPolicy

if TYPE_CHECKING:
    from lorafleet.workers.slots.packed_adapter import PackedAdapter


class SlotRoom:
    """Chooses among the slots of one rank. It changes nothing.

    Arguments of its methods:
        wanted: Digests that waiting requests behind this one need, in queue order.
        keep: Digests that requests before this one need. Their slots are never emptied.
        tenant: The tenant that brings the adapter in.
    """

    def __init__(self, policy: SlotPolicy) -> None:
        self._policy = policy

    def victim(
        self, adapter: PackedAdapter, wanted: Sequence[str] = (), keep: Collection[str] = (), tenant: str = ""
    ) -> Slot | None:
        """Returns the slot to fill next, whose adapter if any must leave, or None if none can be filled.

        An empty slot comes first. Then comes the adapter with the least credit among those that nobody waits for, then
        the adapter that is wanted last. Slots that are held, pinned or being filled, that have an adapter of `keep`,
        or that are in another tenant's share are never returned.
        """
        empty = self._policy.empty
        if empty is not None:
            return empty
        urgency = _urgencies(wanted)
        candidates = self._losers(adapter, tenant, self._usable(keep))
        return min(candidates, key=lambda slot: self._reluctance(slot, urgency), default=None)

    def is_free(self, adapter: PackedAdapter, slot: Slot) -> bool:
        """Returns whether the slot can be filled now, because freed memory suffices for the adapter."""
        if not self._fits(adapter, [slot]):
            return False
        extra_memory = self._policy.extra_memory
        return adapter.extra is None or (slot.extra is None and extra_memory.is_free(adapter.extra_bytes))

    def lacks(self, adapter: PackedAdapter, slot: Slot) -> int:
        """Returns how many bytes the memory for A and B lacks for the adapter once the slot is empty; at least 1 if its
        free ranges are too small, and 0 if there is room."""
        return 0 if self._fits(adapter, [slot]) else max(1, self._missing_bytes(adapter) - _num_bytes([slot]))

    def to_empty(
        self,
        adapter: PackedAdapter,
        slot: Slot,
        wanted: Sequence[str] = (),
        keep: Collection[str] = (),
        tenant: str = "",
    ) -> list[Slot] | None:
        """Returns the idle slots that must be emptied so that the adapter has room. `slot` is emptied in any case, and
        only listed if its extras are in the way.

        Returns None if the slots in use take too much. As for extras, slots in other tenants' shares come last. They
        are not spared, since the memory for extras is in nobody's share.
        """
        idle = [s for s in self._usable(keep) if s is not slot and s.digest is not None]
        if self._missing_bytes(adapter) > _num_bytes([slot, *idle]):
            return None
        urgency, given = _urgencies(wanted), list[Slot]()
        idle.sort(key=lambda s: self._reluctance(s, urgency))
        leaving = self._in_turn(adapter, tenant, idle, [slot])
        while not self._fits(adapter, [slot, *given]):
            next_slot = next(leaving, None)
            if next_slot is None:
                return None
            given.append(next_slot)
        idle = [s for s in idle if s not in given]
        for spare in given[-2::-1]:  # a larger one that came later may suffice
            others = [s for s in given if s is not spare]
            if self._may_stay(spare, others, tenant) and self._fits(adapter, [slot, *others]):
                given = others
                idle.append(spare)
        if adapter.extra is None:
            return given
        given = [slot, *given] if slot.extra is not None else given
        return self._with_extras(adapter, given, [*self._losers(adapter, tenant, idle), *idle])

    def _with_extras(self, adapter: PackedAdapter, given: list[Slot], idle: list[Slot]) -> list[Slot] | None:
        """Returns `given` and as many of the idle slots, in their order, as the adapter's extras need. An idle slot may
        be listed twice."""
        extra_memory = self._policy.extra_memory
        holders = iter(s for s in idle if s.extra is not None)
        while extra_memory.missing(adapter.extra_bytes) > sum(s.extra.num_bytes for s in given if s.extra is not None):
            next_slot = next(holders, None)
            if next_slot is None:
                return None
            if next_slot not in given:
                given = [*given, next_slot]
        return given

    def is_kept_out(self, adapter: PackedAdapter) -> bool:
        """Returns whether the adapter would wait for A and B of pinned adapters, which never leave."""
        memory = self._policy.memory
        if not self._policy.num_pinned or memory.num_bytes < memory.most_bytes:
            return False
        return not self._fits(adapter, [slot for slot in self._policy.slots if not slot.pinned])

    def waits_for_others(self, adapter: PackedAdapter, keep: Collection[str]) -> bool:
        """Returns whether A and B have no room even if the idle slots of all tenants are emptied."""
        return not self._fits(adapter, self._usable(keep))

    def to_drain(self, adapter: PackedAdapter, closed: set[int], tenant: str = "") -> list[Slot]:
        """Returns the slots that no new sequence should take, so that the adapter soon gets a slot and room.

        These are the slots that fewest sequences hold. Slots of `closed`, pinned slots and slots in other tenants'
        shares are left out.
        """
        filled = [s for s in self._policy.slots if s.digest is not None and s.index not in closed and not s.pinned]
        filled.sort(key=lambda s: s.holders)
        drained: list[Slot] = []
        spared: list[Slot] = []
        missing = self._missing_bytes(adapter)
        for slot in self._in_turn(adapter, tenant, filled):
            lacks_bytes = missing > 0 or not self._fits(adapter, drained)
            lacks_extras = adapter.extra is not None and self._with_extras(adapter, drained, []) is None
            if (lacks_bytes and slot.extents) or (lacks_extras and slot.extra is not None):
                drained.append(slot)
                missing -= _num_bytes([slot])
            elif lacks_bytes or lacks_extras:
                spared.append(slot)
            else:
                return drained or ([slot] if self._policy.empty is None else [])
        return drained or spared[:1]

    def to_yield(self, closed: set[int]) -> list[Slot]:
        """Returns the slot in use that no new sequence should take, so that another slot may soon be used. Returns none
        if another may be used now. `closed` is as in to_drain()."""
        if self._policy.num_in_use < self._policy.max_in_use:
            return []
        in_use = [slot for slot in self._policy.in_use.values() if slot.index not in closed]
        return sorted(in_use, key=lambda slot: slot.holders)[:1]

    def _fits(self, adapter: PackedAdapter, given: Sequence[Slot]) -> bool:
        """Returns whether A and B have room once the slots of `given` are empty."""
        if self._missing_bytes(adapter) > _num_bytes(given):
            return False
        return self._policy.memory.find(adapter.cuts, [extent for slot in given for extent in slot.extents]) is not None

    def _missing_bytes(self, adapter: PackedAdapter) -> int:
        """Returns how many more bytes must be free for A and B. Perhaps even more must be, depending on where they
        lie."""
        memory = self._policy.memory
        return adapter.cuts[-1] - (memory.num_bytes - memory.num_used)

    def _usable(self, keep: Collection[str]) -> list[Slot]:
        idle = [slot for slot in self._policy.slots if slot.holders == 0 and not slot.pinned]
        return [slot for slot in idle if slot.digest not in keep and (slot.ready is None or slot.is_ready)]

    def _losers(self, adapter: PackedAdapter, tenant: str, slots: list[Slot]) -> list[Slot]:
        """Returns those of these slots, in their order, that are empty, or that may be emptied so that the tenant gets
        the adapter."""
        digests = [slot.digest for slot in slots if slot.digest is not None]
        losing = self._policy.shares.losers(tenant, digests, adapter.info.num_bytes)
        return [slot for slot in slots if slot.digest is None or slot.digest in losing]

    def _may_stay(self, spare: Slot, others: Sequence[Slot], tenant: str) -> bool:
        """Returns whether an adapter whose bytes are not needed may stay. One of the tenant's own has to leave if its
        share allows the tenant only without it to take room from another tenant."""
        return self._policy.shares.tenant_of(spare.digest) != tenant or not self._are_protected(others, tenant)

    def _are_protected(self, slots: Sequence[Slot], tenant: str) -> bool:
        """Returns whether an adapter in these slots is charged to another tenant that has recently wanted adapters."""
        return any(self._policy.shares.is_protected(slot.digest, tenant) for slot in slots)

    def _in_turn(
        self, adapter: PackedAdapter, tenant: str, slots: list[Slot], given: Sequence[Slot] = ()
    ) -> Iterator[Slot]:
        """Yields those of these slots, which are filled, that may be emptied, in their order, each once `given` and
        those before it are empty."""
        by_digest = {slot.digest: slot for slot in slots if slot.digest is not None}
        gone = [slot.digest for slot in given if slot.digest is not None]
        for digest in self._policy.shares.in_turn(tenant, by_digest, adapter.info.num_bytes, gone):
            yield by_digest[digest]

    def _reluctance(self, slot: Slot, urgency: Mapping[str, int]) -> tuple[int, tuple[float, int]]:
        if slot.digest is None:
            return -1, (0.0, 0)
        return urgency.get(slot.digest, 0), self._policy.credits.of(slot.digest)


def _urgencies(wanted: Sequence[str]) -> dict[str, int]:
    """Returns a number for each digest: the larger it is, the sooner the adapter is wanted."""
    return {digest: len(wanted) - index for index, digest in enumerate(wanted)}


def _num_bytes(slots: Sequence[Slot]) -> int:
    """Returns the bytes of A and B in these slots."""
    return sum(slot.adapter.cuts[-1] for slot in slots if slot.adapter is not None)
