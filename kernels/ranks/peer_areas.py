"""Memory into which the other ranks of a tensor-parallel group send numbers that themselves say that they have come.

Each rank has an area for every other rank, EMPTY at first. A kernel stores its numbers into the others' memory and
reads its own until none is EMPTY any more: no fence, no flag, one crossing of the link
(kernels/ranks/peer_areas_triton.py). Source: Lamport's flags (a value that is never sent), as in TensorRT-LLM's and
FlashInfer's all-reduce.
"""

# N ranks · P programs

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PROGRAMS = 512  # of a launch at most; block i is always program i % PROGRAMS's
MOST_RANKS = 8
# Never sent, by the size of a number: -0.0 in half precision, two of them (a number that means as little) in float32.
EMPTY = {2: -0x8000, 4: -0x7FFF8000}


@dataclass(frozen=True, slots=True)
class PeerAreas:
    """A rank's memory: two halves of N - 1 areas of area_bytes, one area for each other rank's numbers.

    address_N: int64, where each rank's memory lies, in this process's addresses. calls_P: int32 [PROGRAMS], this rank's
    own, zero at first. Of one kernel, whose calls all divide what they send into blocks of one size and dtype.
    """

    rank: int
    size: int
    address_N: Tensor
    calls_P: Tensor
    area_bytes: int

    @staticmethod
    def bytes(size: int, area_bytes: int) -> int:
        return 2 * (size - 1) * area_bytes

    def holds(self, num_bytes: int) -> bool:
        return num_bytes <= self.area_bytes
