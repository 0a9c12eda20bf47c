"""Manages the device memory for the extras of adapters in slots (extra_block.py), within a budget.

Memory is allocated when an adapter gets a slot. It is freed once the adapter has left and no queued step can read it
any more. On a CPU the extras stay in host memory and only count against the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lorafleet.protocol.errors import AdapterTooLarge
from lorafleet.protocol.options import enough_gib
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.pinned_memory import PIECE_BYTES


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Extras of an adapter that has left its slot."""

    extra: ExtraBlock
    quiet: torch.cuda.Event  # queued steps may read the extras until this event


class ExtraMemory:
    """The memory for extras on one device. `limit` is its budget in bytes.

    Under tensor parallelism rank 0 decides by its own parts, which are the largest. On the other ranks, which follow,
    place() waits for memory that is being freed.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self._device = device
        self._placed = 0
        self._leaving: list[_Leaving] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the extras of adapters that are in slots."""
        return self._placed

    def check(self, num_bytes: int, adapter: str) -> None:
        """Raises AdapterTooLarge if extras of this size could never be placed."""
        if num_bytes > self.limit:
            raise AdapterTooLarge(
                f"adapter {adapter!r} needs {num_bytes} bytes on each GPU besides its low-rank matrices (vectors, "
                "replaced norms, vocabulary tables, LoRA on experts, a classification head); "
                f"lora.extra_memory_gib allows {self.limit} for all adapters in slots. "
                f"Raise lora.extra_memory_gib to at least {enough_gib(num_bytes)} and restart; if it is that high "
                "already, lower gpu_memory_utilization, which leaves the GPU more memory."
            )

    def missing(self, num_bytes: int) -> int:
        """Returns how many bytes adapters in slots must free first, beyond what is being freed already."""
        return max(0, self._placed + num_bytes - self.limit)

    def is_free(self, num_bytes: int) -> bool:
        """Returns whether place() would find room without waiting."""
        self.let_go()
        return self._placed + self._leaving_bytes() + num_bytes <= self.limit

    def place(self, extra: ExtraBlock) -> ExtraBlock:
        """Copies the extras to the device on the current stream, and returns them there."""
        assert self.missing(extra.num_bytes) == 0
        for leaving in self._leaving if not self.is_free(extra.num_bytes) else ():
            leaving.quiet.synchronize()
        self.let_go()
        self._placed += extra.num_bytes
        if self._device.type != "cuda":
            return extra
        block = torch.empty(extra.num_bytes, dtype=torch.uint8, device=self._device)
        for to, piece in zip(block.split(PIECE_BYTES), extra.block.split(PIECE_BYTES), strict=True):
            to.copy_(piece, non_blocking=True)
        return extra.in_memory(block)

    def give_back(self, extra: ExtraBlock, quiet: torch.cuda.Event | None) -> None:
        """Frees the extras once `quiet` has passed. It marks the end of the steps that may read them; None if there
        are none."""
        self._placed -= extra.num_bytes
        if quiet is not None:
            self._leaving.append(_Leaving(extra, quiet))

    def _leaving_bytes(self) -> int:
        return sum(leaving.extra.num_bytes for leaving in self._leaving)

    def let_go(self) -> None:
        """Frees the extras that no queued step can read any more."""
        self._leaving = [leaving for leaving in self._leaving if not leaving.quiet.query()]
