"""Copies A and B of adapters from host memory into the device memory that all slots share, beside the steps.

lora_memory.py decides where an adapter lies. A range that an adapter has left is not overwritten before the steps that
may read it have ended.
"""

# L packed linears · A addresses, 1 + slices

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import Int64s
from lorafleet.workers.slots.lora_memory import Extent
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.slots.pinned_memory import PIECE_BYTES


class AdapterCopies:
    """The stream of the copies into `arena`, uint8 on a GPU."""

    def __init__(self, arena: Tensor) -> None:
        self.stream = torch.cuda.Stream(arena.device)
        self._arena = arena
        # Ranges that queued steps may still read, each with the event at the end of these steps.
        self._leaving: list[tuple[Extent, torch.cuda.Event]] = []

    def leave(self, extents: Sequence[Extent], quiet: torch.cuda.Event | None) -> None:
        """Records that an adapter has left these ranges. `quiet` marks the end of the steps that may read them; None if
        there are none."""
        self._leaving = [(extent, event) for extent, event in self._leaving if not event.query()]
        if quiet is not None:
            self._leaving += [(extent, quiet) for extent in extents]

    def copy(self, adapter: PackedAdapter, extents: Sequence[Extent]) -> Int64s:
        """Queues the copies on the current stream, which is self.stream: one for each piece of host memory in each
        range. Returns the addresses of the adapter's matrices, [L, A]; 0 where it has none."""
        for left, quiet in self._leaving:
            if any(_overlap(left, extent) for extent in extents):
                self.stream.wait_event(quiet)
        cuts = np.array(adapter.cuts)
        address_M = np.zeros(len(cuts) - 1, np.int64)
        first = 0
        for extent in extents:
            last = first + extent.num_matrices
            begin, end = int(cuts[first]), int(cuts[last])
            assert end - begin <= extent.num_bytes
            self._copy_range(adapter.block, begin, end, extent.start)
            address_M[first:last] = cuts[first:last] - begin + extent.start + self._arena.data_ptr()
            first = last
        assert first == len(address_M)
        address_LA = np.zeros_like(adapter.table.offset_LA)
        address_LA[adapter.table.offset_LA >= 0] = address_M
        return address_LA

    def _copy_range(self, block: Tensor, begin: int, end: int, target: int) -> None:
        """Copies bytes of the block to the arena. A copy must not span two pieces of pinned memory."""
        while begin < end:
            piece_end = min(end, (begin // PIECE_BYTES + 1) * PIECE_BYTES)
            size = piece_end - begin
            self._arena[target : target + size].copy_(block[begin:piece_end], non_blocking=True)
            begin, target = piece_end, target + size


def _overlap(one: Extent, other: Extent) -> bool:
    return one.start < other.start + other.num_bytes and other.start < one.start + one.num_bytes
