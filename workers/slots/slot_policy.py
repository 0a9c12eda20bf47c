"""Decides which adapter occupies which slot. It only keeps the books and needs no torch; model_manager.py writes the
slots on the device.

A slot is held while a sequence uses it. A held or pinned slot is never overwritten. Each time an adapter leaves a
slot, the slot's generation increases by one.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lorafleet.workers.slots.eviction import Credits, Demand
from lorafleet.workers.slots.fair_shares import FairShares

if TYPE_CHECKING:
    import torch

    from lorafleet.workers.slots.extra_block import ExtraBlock
    from lorafleet.workers.slots.extra_memory import ExtraMemory
    from lorafleet.workers.slots.packed_adapter import PackedAdapter


@dataclass(slots=True)
class Slot:
    """A place for one adapter on this rank's device."""

    index: int
    generation: int = 0
    digest: str | None = None
    adapter: PackedAdapter | None = None
    holders: int = 0  # Sequences in flight that use the slot.
    pinned: bool = False
    # Event at the end of the copy to the GPU; None once the copy is known to be done.
    ready: torch.cuda.Event | None = None
    # Event behind the steps that may read the present content. Set when the last holder leaves; they may still be
    # queued.
    quiet: torch.cuda.Event | None = None
    extra: ExtraBlock | None = None  # The adapter's extras on the serving device; None if it has none.

    @property
    def is_ready(self) -> bool:
        """Whether no copy into the slot is in progress."""
        if self.ready is not None and self.ready.query():
            self.ready = None
        return self.ready is None

    @property
    def is_idle(self) -> bool:
        """Whether the slot, empty or not, is neither held nor pinned."""
        return self.holders == 0 and not self.pinned


class SlotPolicy:
    """The slots of one rank, and the adapters in them.

    Args:
        extra_memory: Memory on the device that the adapters in slots share for their extras.
        mark_quiet: Called with a slot when the last sequence that uses it has ended.
    """

    def __init__(
        self, num_slots: int, demand: Demand, extra_memory: ExtraMemory, mark_quiet: Callable[[Slot], None]
    ) -> None:
        self.slots = [Slot(index) for index in range(num_slots)]
        self.demand = demand
        self.extra_memory = extra_memory
        self.num_activations = 0
        self.num_evictions = 0
        self._mark_quiet = mark_quiet
        self._by_digest: dict[str, Slot] = {}
        self._credits = Credits(demand)
        self._shares = FairShares(demand)

    def find(self, digest: str) -> Slot | None:
        """Returns the slot that holds the adapter, whether its copy has finished or not, or None."""
        return self._by_digest.get(digest)

    @property
    def digests(self) -> KeysView[str]:
        """Digests of the adapters in slots, including those whose copies are in progress."""
        return self._by_digest.keys()

    @property
    def ranks(self) -> list[int]:
        """The largest LoRA rank over all modules for each slot; 0 for an empty slot."""
        return [0 if slot.adapter is None else slot.adapter.info.rank for slot in self.slots]

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in slots, over all ranks."""
        return sum(slot.adapter.info.num_bytes for slot in self.slots if slot.adapter is not None)

    @property
    def num_idle(self) -> int:
        return sum(slot.is_idle for slot in self.slots)

    @property
    def num_pinned(self) -> int:
        return sum(slot.pinned for slot in self.slots)

    @property
    def pinned_extra_bytes(self) -> int:
        """Bytes of extra_memory that pinned adapters occupy."""
        return sum(slot.extra.num_bytes for slot in self.slots if slot.pinned and slot.extra is not None)

    def pin(self, slot: Slot) -> None:
        """Pins the slot, which is then in no tenant's share: the operator has taken it away from all."""
        if not slot.pinned and slot.digest is not None:
            slot.pinned = True
            self._shares.release(slot.digest)

    def hold(self, slot_index: int, tenant: str = "") -> None:
        """Counts one more sequence of this tenant that uses the slot. "" stands for all callers without a tenant."""
        slot = self.slots[slot_index]
        assert slot.adapter is not None
        slot.holders += 1
        if not slot.pinned:
            self._shares.charge(slot.adapter.info.digest, tenant)
        self._credits.use(slot.adapter.info.digest, slot.adapter.info.num_bytes)

    def let_go(self, slot_index: int) -> None:
        slot = self.slots[slot_index]
        assert slot.holders > 0
        slot.holders -= 1
        if slot.holders == 0:
            self._mark_quiet(slot)

    def assign(self, slot: Slot, adapter: PackedAdapter, tenant: str) -> None:
        """Records that the slot, which is empty, is being filled with the adapter for the tenant."""
        assert slot.digest is None and slot.is_idle
        slot.digest, slot.adapter = adapter.info.digest, adapter
        self._credits.use(slot.digest, adapter.info.num_bytes)
        self._shares.charge(slot.digest, tenant)
        self._by_digest[slot.digest] = slot
        self.num_activations += 1

    def clear(self, slot: Slot, *, for_room: bool) -> None:
        """Records that the slot has been emptied. `for_room` says that its adapter has left for lack of room, which
        raises the floor of the credits."""
        assert slot.digest is not None and slot.holders == 0
        if for_room:
            self._credits.evict(slot.digest)
        else:
            self._credits.forget(slot.digest)
        self._shares.release(slot.digest)
        del self._by_digest[slot.digest]
        slot.digest, slot.adapter, slot.extra, slot.ready, slot.pinned = None, None, None, None, False
        slot.generation += 1
        self.num_evictions += 1

    def victim(self, wanted: Sequence[str] = (), keep: Sequence[str] = (), tenant: str = "") -> Slot | None:
        """Returns the slot to fill next, whose adapter if any must leave, or None if none can be filled.

        An empty slot comes first. Then comes the adapter with the least credit among those that nobody waits for, then
        the adapter that is wanted last. Slots that are held, pinned or being filled, that have an adapter of `keep`,
        or that are in another tenant's share are never returned.
        """
        urgency = _urgencies(wanted)
        candidates = self._losers(tenant, self._usable(keep))
        return min(candidates, key=lambda slot: self._reluctance(slot, urgency), default=None)

    def has_room(self, adapter: PackedAdapter, slot: Slot) -> bool:
        """Returns whether the slot can be filled now, because freed memory suffices for the extras. A plain adapter
        needs none."""
        return adapter.extra is None or (slot.extra is None and self.extra_memory.is_free(adapter.extra_bytes))

    def to_empty(
        self,
        adapter: PackedAdapter,
        slot: Slot,
        wanted: Sequence[str] = (),
        keep: Sequence[str] = (),
        tenant: str = "",
    ) -> list[Slot] | None:
        """Returns the idle slots, `slot` first, that must be emptied so that the adapter's extras have room.

        Returns None if the slots in use take too much. `wanted` and `keep` are as in victim(). Slots in other tenants'
        shares come last. They are not spared, since the memory for extras is in nobody's share.
        """
        if adapter.extra is None:
            return []
        given: list[Slot] = [slot] if slot.extra is not None else []
        urgency = _urgencies(wanted)
        idle = [s for s in self._usable(keep) if s is not slot and s.extra is not None]
        losers = self._losers(tenant, idle)
        idle.sort(key=lambda s: (s not in losers, self._reluctance(s, urgency)), reverse=True)
        while self.extra_memory.missing(adapter.extra_bytes) > sum(s.adapter.extra_bytes for s in given if s.adapter):
            if not idle:
                return None
            given.append(idle.pop())
        return given

    def to_drain(self, adapter: PackedAdapter, closed: set[int], tenant: str = "") -> list[Slot]:
        """Returns the slots that no new sequence should take, so that the adapter soon gets a slot and room for its
        extras.

        These are the slots that fewest sequences hold. Slots of `closed`, pinned slots and slots in other tenants'
        shares are left out.
        """
        usable = self._losers(tenant, [s for s in self.slots if s.index not in closed and not s.pinned])
        usable.sort(key=lambda s: s.holders)
        missing = self.extra_memory.missing(adapter.extra_bytes) if adapter.extra is not None else 0
        drained: list[Slot] = []
        for slot in usable:
            if missing > 0 and slot.extra is not None:
                drained.append(slot)
                missing -= slot.extra.num_bytes
        return drained or usable[:1]

    def _usable(self, keep: Sequence[str]) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_idle and slot.digest not in keep and slot.is_ready]

    def _losers(self, tenant: str, slots: list[Slot]) -> list[Slot]:
        """Returns those of these slots that are empty, or that may be emptied so that the tenant gets one more
        adapter."""
        losing = self._shares.losers(tenant, [slot.digest for slot in slots if slot.digest is not None])
        return [slot for slot in slots if slot.digest is None or slot.digest in losing]

    def _reluctance(self, slot: Slot, urgency: Mapping[str, int]) -> tuple[int, tuple[float, int]]:
        return (-1, (0.0, 0)) if slot.digest is None else (urgency.get(slot.digest, 0), self._credits.of(slot.digest))


def _urgencies(wanted: Sequence[str]) -> dict[str, int]:
    """Returns a number for each digest: the larger it is, the sooner the adapter is wanted."""
    return {digest: len(wanted) - index for index, digest in enumerate(wanted)}
