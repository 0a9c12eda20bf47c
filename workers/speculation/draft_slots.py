"""Keeps the draft LoRAs of the adapters in slots in slots of the draft model. Both have the same number.

A draft LoRA changes the draft model as its adapter changes the base, so that more drafts are right. It comes and goes
with its adapter. Where it is missing, or has no room, the draft model drafts without it.
"""

from __future__ import annotations

import logging

from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import PackedAdapter

log = logging.getLogger(__name__)


class DraftSlots:
    """The slots of the draft model. `manager` has as many as the target's."""

    def __init__(self, manager: LoRAModelManager) -> None:
        self._manager = manager

    @property
    def ranks(self) -> list[int]:
        """The largest LoRA rank in each slot; 0 for an empty one."""
        return self._manager.policy.ranks

    def fill(self, index: int, draft: PackedAdapter | None) -> None:
        """Starts to copy the draft LoRA of the adapter that gets this slot, if it has one. The slot is empty before."""
        if draft is None:
            return
        slot = self._manager.slots[index]
        if self._manager.room.is_free(draft, slot):
            self._manager.activate(draft, slot)
        else:
            log.info("adapter %s: there is no room for its draft LoRA now", draft.info.digest[:12])

    def empty(self, index: int) -> None:
        """Empties the slot, whose adapter leaves the target's. Steps that read it may still be queued."""
        slot = self._manager.slots[index]
        if slot.digest is not None:
            self._manager.mark_quiet(slot)
            self._manager.deactivate(slot)

    def find(self, index: int | None, digest: str) -> int | None:
        """Returns the slot if it has this adapter's draft LoRA, and the copy is done."""
        if index is None:
            return None
        slot = self._manager.slots[index]
        return index if slot.digest == digest and slot.is_ready else None

    def wait_for_copies(self) -> None:
        self._manager.wait_for_copies()
