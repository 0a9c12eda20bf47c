"""Defines the interface through which the scheduler uses adapters and their slots. workers/slots/ implements it.

It is apart from workers/slots/, so that a scheduler can be read, imported and tested without the memory of slots.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest


class ResidentAdapter(Protocol):
    @property
    def info(self) -> AdapterInfo: ...


class SlotView(Protocol):
    """A place for one adapter's weights on the GPU."""

    @property
    def index(self) -> int: ...

    @property
    def adapter(self) -> ResidentAdapter | None:
        """The adapter whose weights are in the slot, or are being copied into it."""

    @property
    def is_ready(self) -> bool:
        """Whether a step that is launched now may use the slot, because no copy into it is in progress."""


class SlotTable(Protocol):
    @property
    def usable_digests(self) -> Container[str]:
        """The digests of the adapters in slots that one more sequence may use now, or once they are copied."""

    def find(self, digest: str) -> SlotView | None:
        """Returns the adapter's slot, or None."""

    def may_use(self, slot_index: int) -> bool:
        """Returns whether one more sequence may use the slot. Sequences use a limited number of slots at a time."""

    def hold(self, slot_index: int, tenant: str) -> None:
        """Counts one more sequence of this tenant that uses the slot. The slot's content stays until let_go()."""

    def let_go(self, slot_index: int) -> None:
        """Counts one sequence fewer that uses the slot."""


class AdapterSlots(Protocol):
    @property
    def slots(self) -> SlotTable: ...

    def prefetch(self, wanted: Sequence[LoRARequest], tenants: Mapping[str, str]) -> None:
        """Starts to bring these adapters nearer to the GPU, the first ones first.

        `tenants` maps each adapter's digest to the tenant that waits for it.
        """

    def slot_for(self, lora: LoRARequest) -> SlotView | None:
        """Returns the adapter's slot, filled or being filled, or None if it has none."""

    def claims(self, digest: str, claimed: set[int], tenant: str) -> set[int]:
        """Returns the indices of slots, beyond those claimed for others, that should drain for an adapter that has no
        slot, or one that may not be used now."""
