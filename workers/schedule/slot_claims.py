"""Finds the slots that waiting requests may use. A slot that drains for an earlier request is claimed: no request
behind it is admitted to that slot."""

from __future__ import annotations

from collections.abc import Iterable

from lorafleet.workers.schedule.adapter_slots import AdapterSlots, SlotView
from lorafleet.workers.schedule.sequence import Sequence


class SlotClaims:
    """The claims of one pass over the waiting requests, which asks for slots in the order of the queue."""

    def __init__(self, loras: AdapterSlots | None) -> None:
        self._loras = loras
        self._claimed: set[int] = set()  # Slots that drain for an earlier request.
        self._blocked: set[str] = set()  # Adapters that this pass has found without a usable slot.

    def slot_for(self, sequence: Sequence) -> SlotView | None:
        """Returns the slot of the sequence's adapter, or None if it needs none or has none that may be used now."""
        lora = sequence.lora
        if lora is None or lora.digest in self._blocked:
            return None
        assert self._loras is not None, "requests with adapters are rejected where LoRA is off"
        slot = self._loras.slot_for(lora)
        if not self._may_use(slot, sequence):
            self._blocked.add(lora.digest)
            return None
        return slot

    def first_startable(self, heads: Iterable[Sequence]) -> Sequence | None:
        """Returns the first sequence that needs no slot, or whose adapter is in a usable one.

        Slots that drain for the skipped sequences are claimed.
        """
        for head in heads:
            if head.lora is None or self._loras is None:
                return head
            if self._may_use(self._loras.slots.find(head.lora.digest), head):
                return head
        return None

    def _may_use(self, slot: SlotView | None, sequence: Sequence) -> bool:
        """Returns whether the sequence may use the slot of its adapter now. If it waits for others to end, slots are
        claimed for it."""
        assert self._loras is not None and sequence.lora is not None
        if slot is None or not self._loras.slots.may_use(slot.index):
            self._claimed |= self._loras.claims(sequence.lora.digest, self._claimed, sequence.tenant)
            return False
        return slot.index not in self._claimed and slot.is_ready
