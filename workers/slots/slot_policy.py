"""Records which adapter occupies which slot, and who uses it. It needs no torch: slot_room.py decides which adapters
leave for others, and model_manager.py writes the slots on the device.

A slot is a row of the device tables. The adapter's A and B lie in the memory that all slots share (lora_memory.py).

A slot is held while a sequence uses it. A held or pinned slot is never overwritten. Each time an adapter leaves a
slot, the slot's generation increases by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lorafleet.workers.slots.eviction import Credits, Demand
from lorafleet.workers.slots.fair_shares import FairShares

if TYPE_CHECKING:
    import torch

    from lorafleet.workers.slots.extra_block import ExtraBlock
    from lorafleet.workers.slots.extra_memory import ExtraMemory
    from lorafleet.workers.slots.lora_memory import Extent, LoRAMemory
    from lorafleet.workers.slots.packed_adapter import PackedAdapter

COST = 1  # The cost of every adapter, see eviction.py.


@dataclass(slots=True, eq=False)
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
    extents: tuple[Extent, ...] = ()  # Where the adapter's A and B lie in the memory of all slots.
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
        max_in_use: Most slots that sequences may use at the same time.
        memory: Memory on the device that the adapters in slots share for A and B.
        extra_memory: Memory on the device that they share for their extras.
        mark_quiet: Called with a slot when the last sequence that uses it has ended.
    """

    def __init__(
        self,
        num_slots: int,
        max_in_use: int,
        demand: Demand,
        memory: LoRAMemory,
        extra_memory: ExtraMemory,
        mark_quiet: Callable[[Slot], None],
    ) -> None:
        self.slots = [Slot(index) for index in range(num_slots)]
        self.ranks = [0] * num_slots  # The largest LoRA rank over all modules for each slot; 0 for an empty slot.
        self.max_in_use = max_in_use
        self.in_use: dict[int, Slot] = {}  # Slots with holders, by index.
        self.demand = demand
        self.memory = memory
        self.extra_memory = extra_memory
        self.num_activations = 0
        self.num_evictions = 0
        self._mark_quiet = mark_quiet
        self._pinned: dict[int, Slot] = {}  # By index.
        self._by_digest: dict[str, Slot] = {}
        self.credits = Credits(demand)
        self.shares = FairShares(demand)

    def find(self, digest: str) -> Slot | None:
        """Returns the slot that holds the adapter, whether its copy has finished or not, or None."""
        return self._by_digest.get(digest)

    @property
    def usable_digests(self) -> Collection[str]:
        """Digests of the adapters in slots that one more sequence may use beside those in use, including those whose
        copies are in progress."""
        if len(self.in_use) < self.max_in_use:
            return self._by_digest.keys()
        return {slot.digest for slot in self.in_use.values() if slot.digest is not None}

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in slots, over all ranks."""
        return sum(slot.adapter.info.num_bytes for slot in self.slots if slot.adapter is not None)

    @property
    def num_in_use(self) -> int:
        return len(self.in_use)

    @property
    def num_idle(self) -> int:
        return len(self.slots) - len(self.in_use.keys() | self._pinned.keys())

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def empty(self) -> Slot | None:
        """The first slot without an adapter, or None."""
        if len(self._by_digest) == len(self.slots):
            return None
        return next(slot for slot in self.slots if slot.digest is None)

    @property
    def num_usable(self) -> int:
        """Number of further adapters that sequences may use now. If memory is the limit, they are assumed to be as
        large as those in slots on average."""
        usable = min(self.num_idle, self.max_in_use - self.num_in_use)
        held = [(slot, slot.adapter.cuts[-1]) for slot in self.slots if slot.adapter is not None]
        total_bytes = sum(num_bytes for _, num_bytes in held)
        if not total_bytes:
            return usable
        free_bytes = self.memory.most_bytes - sum(num_bytes for slot, num_bytes in held if not slot.is_idle)
        return min(usable, free_bytes * len(held) // total_bytes)

    @property
    def pinned_extra_bytes(self) -> int:
        """Bytes of extra_memory that pinned adapters occupy."""
        return sum(slot.extra.num_bytes for slot in self._pinned.values() if slot.extra is not None)

    def pin(self, slot: Slot) -> None:
        """Pins the slot, which is then in no tenant's share: the operator has taken it away from all."""
        if not slot.pinned and slot.digest is not None:
            slot.pinned = True
            self._pinned[slot.index] = slot
            self.shares.release(slot.digest)

    def unpin(self, digest: str) -> None:
        """Makes the adapter's slot, if it has one, as any other."""
        slot = self.find(digest)
        if slot is not None:
            slot.pinned = False
            self._pinned.pop(slot.index, None)

    def may_use(self, slot_index: int) -> bool:
        """Returns whether one more sequence may use the slot beside those in use."""
        return slot_index in self.in_use or len(self.in_use) < self.max_in_use

    def hold(self, slot_index: int, tenant: str = "") -> None:
        """Counts one more sequence of this tenant that uses the slot. "" stands for all callers without a tenant."""
        slot = self.slots[slot_index]
        assert slot.adapter is not None and self.may_use(slot_index)
        self.in_use[slot.index] = slot
        slot.holders += 1
        if not slot.pinned:
            self.shares.charge(slot.adapter.info.digest, tenant, slot.adapter.info.num_bytes)
        self.credits.use(slot.adapter.info.digest, COST)

    def let_go(self, slot_index: int) -> None:
        slot = self.slots[slot_index]
        assert slot.holders > 0
        slot.holders -= 1
        if slot.holders == 0:
            del self.in_use[slot_index]
            self._mark_quiet(slot)

    def assign(self, slot: Slot, adapter: PackedAdapter, tenant: str) -> None:
        """Records that the slot, which is empty, is being filled with the adapter for the tenant."""
        assert slot.digest is None and slot.is_idle
        slot.digest, slot.adapter = adapter.info.digest, adapter
        self.ranks[slot.index] = adapter.info.rank
        self.credits.use(slot.digest, COST)
        self.shares.charge(slot.digest, tenant, adapter.info.num_bytes)
        self._by_digest[slot.digest] = slot
        self.num_activations += 1

    def clear(self, slot: Slot, *, for_room: bool) -> None:
        """Records that the slot has been emptied. `for_room` says that its adapter has left for lack of room, which
        raises the floor of the credits."""
        assert slot.digest is not None and slot.holders == 0
        if for_room:
            self.credits.evict(slot.digest)
        else:
            self.credits.forget(slot.digest)
        self.shares.release(slot.digest)
        del self._by_digest[slot.digest]
        slot.digest, slot.adapter, slot.extra, slot.ready, slot.pinned = None, None, None, None, False
        slot.extents = ()
        self._pinned.pop(slot.index, None)
        slot.generation += 1
        self.ranks[slot.index] = 0
        self.num_evictions += 1
