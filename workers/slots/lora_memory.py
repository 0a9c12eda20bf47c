"""Divides the device memory for A and B among the adapters in slots. It only records the ranges and needs no torch.

An adapter takes the bytes of its own rank and modules. It lies in one range of the memory if there is one, otherwise in
several: the kernels have an address for each matrix, so a block may be cut before any of its matrices. Cutting leaves
less than one matrix of each free range unused. Pages of equal size would waste part of each adapter's last page, and
would have to be as large as the largest matrix (benchmarks/lora_fragmentation.py compares them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from lorafleet.protocol.errors import AdapterTooLarge
from lorafleet.protocol.options import enough_gib

MAX_EXTENTS = 8  # Most ranges of one adapter, since each is at least one copy.

Range = tuple[int, int]  # First byte and number of bytes.


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A range of the memory with consecutive matrices of one adapter."""

    start: int  # In bytes, from the beginning of the memory.
    num_bytes: int
    num_matrices: int


class LoRAMemory:
    """The free and the used ranges of `num_bytes` bytes, which may become more, and fewer again.

    Under tensor parallelism rank 0 decides by its own parts, which are the largest. The other ranks put the same
    matrices into the same ranges.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.most_bytes = num_bytes  # Bytes that there may be at a time.
        self.num_used = 0
        self._free: list[Range] = [(0, num_bytes)] if num_bytes else []  # By start; no two are adjacent.

    @property
    def free_ranges(self) -> Sequence[Range]:
        return self._free

    def check(self, num_bytes: int, adapter: str) -> None:
        """Raises AdapterTooLarge if A and B of this size could never be placed."""
        if num_bytes > self.most_bytes:
            raise AdapterTooLarge(
                f"adapter {adapter!r} needs {num_bytes} bytes on each GPU for A and B; lora.lora_memory_gib allows "
                f"{self.most_bytes} for all adapters in slots. Raise lora.lora_memory_gib to at least "
                f"{enough_gib(num_bytes)} and restart, or leave it out."
            )

    def find(self, cuts: Sequence[int], beside: Iterable[Extent] = ()) -> list[Extent] | None:
        """Returns where a block could lie, or None if there is no room. Takes nothing.

        Args:
            cuts: The offset in bytes of each matrix in the block, ascending, then the end of the block.
            beside: Used ranges that count as free.
        """
        freed = [(extent.start, extent.num_bytes) for extent in beside]
        size, num_matrices = cuts[-1], len(cuts) - 1
        if num_matrices == 0:
            return []
        if self.num_bytes - self.num_used + sum(num_bytes for _, num_bytes in freed) < size:
            return None
        free = _merged(sorted([*self._free, *freed])) if freed else self._free
        whole = min((found for found in free if found[1] >= size), key=lambda found: found[1], default=None)
        if whole is not None:
            return [Extent(whole[0], size, num_matrices)]
        return _cut(cuts, sorted(free, key=lambda found: found[1], reverse=True))

    def grow(self, start: int, num_bytes: int) -> None:
        """Adds a range that is free."""
        self._free = _merged(sorted([*self._free, (start, num_bytes)]))
        self.num_bytes += num_bytes

    def shrink(self, start: int, num_bytes: int) -> None:
        """Takes away a range that is free."""
        self.take([Extent(start, num_bytes, 0)])
        self.num_used -= num_bytes
        self.num_bytes -= num_bytes

    def take(self, extents: Iterable[Extent]) -> None:
        """Marks free ranges as used."""
        for extent in extents:
            index = bisect_right(self._free, extent.start, key=lambda free: free[0]) - 1
            start, size = self._free[index]
            end, extent_end = start + size, extent.start + extent.num_bytes
            assert index >= 0 and start <= extent.start and extent_end <= end, "the range is not free"
            parts = (start, extent.start - start), (extent_end, end - extent_end)
            self._free[index : index + 1] = [part for part in parts if part[1]]
            self.num_used += extent.num_bytes

    def give_back(self, extents: Sequence[Extent]) -> None:
        """Marks used ranges as free."""
        self._free = _merged(sorted([*self._free, *((extent.start, extent.num_bytes) for extent in extents)]))
        self.num_used -= sum(extent.num_bytes for extent in extents)


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """Joins adjacent ranges, which are sorted by their start."""
    merged: list[Range] = []
    for start, size in ranges:
        if merged and sum(merged[-1]) == start:
            merged[-1] = merged[-1][0], merged[-1][1] + size
        elif size:
            merged.append((start, size))
    return merged


def _cut(cuts: Sequence[int], free: Sequence[Range]) -> list[Extent] | None:
    """Fills the ranges in their order, each with as many of the next matrices as it holds."""
    extents: list[Extent] = []
    first, last = 0, len(cuts) - 1
    for start, size in free:
        end = bisect_right(cuts, cuts[first] + size) - 1
        if end > first:
            extents.append(Extent(start, cuts[end] - cuts[first], end - first))
            first = end
        if first == last:
            return extents
        if len(extents) == MAX_EXTENTS:
            break
    return None
