"""Memory into which the other ranks of a tensor-parallel group send numbers that signal their own arrival.

Each rank has one area for every other rank, filled with EMPTY at first. A kernel stores its numbers into the others'
memory, and reads its own until no number is EMPTY: there is no fence, no flag, and one crossing of the link
(kernels/ranks/peer_areas_triton.py).
Source: Lamport's flags (a value that is never sent), as in TensorRT-LLM's and FlashInfer's all-reduce.
"""

# N ranks · P programs

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PROGRAMS = 512  # largest number of programs of a launch; program i % PROGRAMS always takes block i
MOST_RANKS = 8
ALIGNMENT = 32  # an area's size in bytes is a multiple: kernels send 16 bytes at a time, perhaps to its second half
# The bits that are never sent, by the size of a number in bytes: -0.0 in half precision, and the bits of two of them in
# float32, where they are a number that matters as little.
EMPTY = {2: -0x8000, 4: -0x7FFF8000}


@dataclass(frozen=True, slots=True)
class PeerAreas:
    """A rank's memory, in two halves. Each half has N - 1 areas, one for each other rank's numbers.

    It belongs to one kernel, whose calls all divide what they send into blocks of one size and dtype.
    """

    rank: int
    size: int
    address_N: Tensor  # int64: where each rank's memory lies, in this process's addresses
    calls_P: Tensor  # int32 [PROGRAMS]: this rank's own count of calls, zero at first
    area_bytes: int  # size of one area

    @staticmethod
    def bytes(size: int, area_bytes: int) -> int:
        return 2 * (size - 1) * area_bytes

    def holds(self, num_bytes: int) -> bool:
        return num_bytes <= self.area_bytes
