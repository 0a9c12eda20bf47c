"""The device memory of the extras of adapters in slots (extra_block.py), within a budget.

Taken when an adapter gets a slot, given back when it leaves and no queued step can read it any more. On a CPU the
extras stay where they are in host memory and only count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lorafleet.protocol.errors import AdapterTooLarge
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.pinned_memory import PIECE_BYTES


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Until the event, queued steps may read it."""

    extra: ExtraBlock
    quiet: torch.cuda.Event


class ExtraMemory:
    """limit: bytes. Under tensor parallelism rank 0 decides by its own parts, which are the largest, and the other
    ranks obey: place() waits there for what is leaving."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self._device = device
        self._placed = 0
        self._leaving: list[_Leaving] = []

    @property
    def num_bytes(self) -> int:
        """Of the adapters that are in slots."""
        return self._placed

    def check(self, num_bytes: int, adapter: str) -> None:
        """Raises AdapterTooLarge for what could never be placed."""
        if num_bytes > self.limit:
            raise AdapterTooLarge(
                f"adapter {adapter!r} needs {num_bytes} bytes on each GPU besides its low-rank matrices (vectors, "
                "replaced norms, vocabulary tables, LoRA on experts); "
                f"lora.extra_memory_gib allows {self.limit} for all adapters in slots. "
                f"Raise lora.extra_memory_gib to at least {num_bytes / 2**30:.3f} and restart; where it is that "
                "high already, leave the GPU more memory by a lower gpu_memory_utilization."
            )

    def missing(self, num_bytes: int) -> int:
        """Bytes that adapters in slots must give back first, beyond what is leaving already."""
        return max(0, self._placed + num_bytes - self.limit)

    def is_free(self, num_bytes: int) -> bool:
        """Whether place() would find room without waiting."""
        self._let_go()
        return self._placed + self._leaving_bytes() + num_bytes <= self.limit

    def place(self, extra: ExtraBlock) -> ExtraBlock:
        """The extras on the device, copied there on the current stream."""
        assert self.missing(extra.num_bytes) == 0
        for leaving in self._leaving if not self.is_free(extra.num_bytes) else ():
            leaving.quiet.synchronize()
        self._let_go()
        self._placed += extra.num_bytes
        if self._device.type != "cuda":
            return extra
        block = torch.empty(extra.num_bytes, dtype=torch.uint8, device=self._device)
        for to, piece in zip(block.split(PIECE_BYTES), extra.block.split(PIECE_BYTES), strict=True):
            to.copy_(piece, non_blocking=True)
        return extra.in_memory(block)

    def give_back(self, extra: ExtraBlock, quiet: torch.cuda.Event | None) -> None:
        """quiet: the steps that may read it; None where there were none."""
        self._placed -= extra.num_bytes
        if quiet is not None:
            self._leaving.append(_Leaving(extra, quiet))

    def _leaving_bytes(self) -> int:
        return sum(leaving.extra.num_bytes for leaving in self._leaving)

    def _let_go(self) -> None:
        self._leaving = [leaving for leaving in self._leaving if not leaving.quiet.query()]
