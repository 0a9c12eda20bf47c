"""Moves adapters from host memory into slots, and empties slots, on all ranks of a replica.

Pinned adapters come first, then those of waiting requests in queue order. slot_policy.py picks the slots, and
model_manager.py writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from lorafleet.protocol.errors import AdapterError
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.names import tenant_of
from lorafleet.workers.pool.memory_pool import MemoryPool
from lorafleet.workers.pool.pool_cost import RecentRequests
from lorafleet.workers.pool.pool_room import PoolRoom
from lorafleet.workers.slots.adapter_lives import AdapterLives, AdapterState
from lorafleet.workers.slots.cpu_tier import CPUTier
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.slots.slot_policy import Slot
from lorafleet.workers.speculation.draft_slots import DraftSlots
from lorafleet.workers.tp.rank_messages import EmptySlot, FillSlot, Order
from lorafleet.workers.weak_method import weak

Sharing = tuple[MemoryPool, RecentRequests]


def owner(lora: LoRARequest) -> str:
    """Returns the tenant that owns the adapter; "" for a public one."""
    return tenant_of(lora.lora_name) or ""


class SlotFiller:
    """Fills the slots of one worker.

    Args:
        send: Sends an order to the other ranks, which fill theirs likewise.
        sharing: The pool from which adapters may borrow memory, and the requests by which it knows their worth. None if
            their memory is fixed.
        drafts: The slots of the draft model, which hold the same adapters' draft LoRAs. None if there are none.
    """

    def __init__(
        self,
        manager: LoRAModelManager,
        cpu: CPUTier,
        lives: AdapterLives,
        send: Callable[[Order], None],
        sharing: Sharing | None = None,
        drafts: DraftSlots | None = None,
    ) -> None:
        self.pins: dict[str, LoRARequest] = {}  # By digest.
        self._manager = manager
        self._slots, self._room = manager.policy, manager.room
        self._cpu = cpu
        self._lives = lives
        self._send = send
        self._drafts = drafts
        self.pool: PoolRoom | None = None  # The memory shared with KV blocks; None if the adapters' memory is fixed.
        if sharing is not None:
            self.pool = PoolRoom(*sharing, self._slots, self._room, weak(self.evict_everywhere))

    def begin_step(self) -> None:
        """Must be called before each step is scheduled."""
        if self.pool is not None:
            self.pool.advance()

    def place_pins(self) -> list[LoRARequest]:
        """Gives pinned adapters their slots. Returns those that have none and are not in host memory."""
        absent, keep = [], list(self.pins)
        for digest, lora in self.pins.items():
            slot, adapter = self._slots.find(digest), self._cpu.get(digest)
            if slot is None and adapter is not None:
                free = self._room.victim(adapter, keep=keep, tenant=owner(lora))
                if (
                    free is not None
                    and not self._waits_for_memory(adapter, free, owner(lora), keep=keep)
                    and self._make_room(adapter, free, owner(lora), keep=keep)
                ):
                    self._fill(free, lora, adapter, owner(lora))
                    slot = free
            if slot is not None:
                self._slots.pin(slot)
            elif adapter is None:
                absent.append(lora)
        return absent

    def fill(self, wanted: Sequence[LoRARequest], tenants: Mapping[str, str]) -> list[tuple[str, AdapterError]]:
        """Starts each adapter's copy as soon as a slot and room for its bytes are free, even if its request cannot be
        admitted yet. Room that the first adapter waits for is not taken by those behind it, except by tenants that hold
        less than its own.

        Returns the adapters that can get no room, as (digest, error). `wanted` and `tenants` are as in
        WorkerLoRAManager.prefetch().
        """
        digests, waits_for_extras = [lora.digest for lora in wanted], False
        served: set[str] = set()  # Tenants that get no more slots now.
        waiting: str | None = None  # Tenant whose adapter waits for bytes that are in use.
        rejected: list[tuple[str, AdapterError]] = []
        if self.pool is not None:
            self.pool.wanted = frozenset(digests)
        for index, digest in enumerate(digests):
            adapter, tenant = self._cpu.get(digest), tenants.get(digest, "")
            if (
                tenant in served
                or adapter is None
                or self._slots.find(digest) is not None
                or (waits_for_extras and adapter.extra)
                or (waiting is not None and not self._slots.shares.holds_less(tenant, waiting))
            ):
                continue
            before = frozenset(digests[:index])
            slot = self._room.victim(adapter, digests[index + 1 :], before, tenant)
            if slot is None or self._waits_for_memory(adapter, slot, tenant, digests[index + 1 :], before):
                served.add(tenant)
            elif self._make_room(adapter, slot, tenant, digests[index + 1 :], before):
                self._fill(slot, wanted[index], adapter, tenant)
            else:
                rejected += self._check_pins(wanted[index], adapter)
                if waiting is None and self._room.waits_for_others(adapter, before):
                    waiting = tenant
                elif adapter.extra is not None:
                    waits_for_extras = True
                else:
                    served.add(tenant)
        return rejected

    def count(self, digest: str) -> None:
        """Counts a request for the adapter, by which a pool knows its worth."""
        if self.pool is not None:
            self.pool.count(digest, self._cpu.get(digest))

    def to_drain(self, digest: str, claimed: set[int], tenant: str) -> list[Slot]:
        """Returns the slots of WorkerLoRAManager.claims(). There are none if the adapter is not in host memory yet, or
        if memory for it is on its way."""
        if self._slots.find(digest) is not None:
            return self._room.to_yield(claimed)
        adapter = self._cpu.get(digest)
        if adapter is None or (self.pool is not None and self.pool.is_bringing):
            return []
        return self._room.to_drain(adapter, claimed, tenant)

    def poll_copies(self) -> None:
        """Records the copies that have ended, with their durations as steps see them."""
        for digest in self._lives.in_state(AdapterState.COPYING):
            slot = self._slots.find(digest)
            assert slot is not None, digest
            if slot.is_ready:
                self._lives.enter(digest, AdapterState.IN_SLOT)

    def empty(self, slot: Slot) -> None:
        """Empties a slot for another reason than lack of room, such as that its adapter is dropped."""
        self._manager.deactivate(slot)
        if self._drafts is not None:
            self._drafts.empty(slot.index)
        self._send(EmptySlot(slot.index))

    def evict_everywhere(self, slot: Slot) -> None:
        """Empties an idle slot for lack of room."""
        self._evict(slot)
        self._send(EmptySlot(slot.index))

    def empty_all(self) -> None:
        """Empties all slots, which nobody holds. Pinned adapters get their slots back from place_pins()."""
        for slot in self._slots.slots:
            if slot.digest is not None:
                digest = slot.digest
                self.empty(slot)
                self._left(digest)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        if self._drafts is not None:
            self._drafts.wait_for_copies()

    def _waits_for_memory(
        self, adapter: PackedAdapter, slot: Slot, tenant: str, wanted: Sequence[str] = (), keep: Collection[str] = ()
    ) -> bool:
        """Returns whether the adapter should wait for memory that the KV cache is lending."""
        return self.pool is not None and self.pool.waits(adapter, slot, tenant, wanted, keep)

    def _make_room(
        self, adapter: PackedAdapter, slot: Slot, tenant: str, wanted: Sequence[str] = (), keep: Collection[str] = ()
    ) -> bool:
        """Evicts what must leave for the adapter's bytes. Returns whether the slot can be filled with it now."""
        for victim in self._room.to_empty(adapter, slot, wanted, keep, tenant) or ():
            self.evict_everywhere(victim)
        return self._room.is_free(adapter, slot)

    def _fill(self, slot: Slot, lora: LoRARequest, adapter: PackedAdapter, tenant: str) -> None:
        self._lives.enter(lora.digest, AdapterState.COPYING, lora.lora_name)
        self._evict(slot)
        self._manager.activate(adapter, slot, tenant)
        if self._drafts is not None:
            self._drafts.fill(slot.index, adapter.draft)
        self._send(FillSlot(lora.digest, slot.index, slot.generation, list(slot.extents)))

    def _evict(self, slot: Slot) -> None:
        digest = slot.digest
        self._manager.evict(slot)
        if self._drafts is not None:
            self._drafts.empty(slot.index)
        if digest is not None:
            self._left(digest)

    def _left(self, digest: str) -> None:
        """Records that an adapter has left its slot."""
        if self._lives.state(digest) is not AdapterState.DROPPING:
            self._lives.enter(digest, AdapterState.IN_HOST if digest in self._cpu else AdapterState.GONE)

    def _check_pins(self, lora: LoRARequest, adapter: PackedAdapter) -> list[tuple[str, AdapterError]]:
        """Rejects an adapter that would wait for memory of pinned adapters, which never leave."""
        pinned, limit = self._slots.pinned_extra_bytes, self._slots.extra_memory.limit
        if self._room.is_kept_out(adapter):
            error = AdapterError(
                f"adapter {lora.lora_name!r} needs {adapter.cuts[-1]} bytes on each GPU for A and B; pinned adapters "
                f"leave too little of the {self._slots.memory.num_bytes} that lora.lora_memory_gib allows. Unpin one, "
                "or raise lora.lora_memory_gib."
            )
            return [(lora.digest, error)]
        if pinned + adapter.extra_bytes <= limit:
            return []
        error = AdapterError(
            f"adapter {lora.lora_name!r} needs {adapter.extra_bytes} bytes on each GPU besides A and B; pinned "
            f"adapters use {pinned} of the {limit} that lora.extra_memory_gib allows. Unpin one, or raise "
            "lora.extra_memory_gib."
        )
        return [(lora.digest, error)]
