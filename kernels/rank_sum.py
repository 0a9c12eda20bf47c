"""Where the rows lie that kernels/rank_sum_triton.py adds: memory of every rank's GPU that all ranks can read."""

# N ranks · P programs of the kernel

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

PROGRAMS = 128  # at most one for each SM: all run at once, on all ranks, so none waits for one that cannot start
MOST_RANKS = 8
FLAG_BYTES = PROGRAMS * MOST_RANKS * 4
# Of rows. Larger sums are left to collectives, which divide the work among the ranks: of more than two, every rank
# reads more here than it would there. Measured on H200s (benchmarks/rank_sum.py).
HALF_BYTES = 4 << 20
HALF_BYTES_OF_MANY = 256 << 10
BYTES = FLAG_BYTES + 2 * HALF_BYTES


@dataclass(frozen=True, slots=True)
class PeerRows:
    """address_N: int64, where each rank's memory lies, in this process's addresses: FLAG_BYTES of flags, zero at first,
    and two halves. calls_P: int32 [PROGRAMS], this rank's own, zero at first."""

    rank: int
    size: int
    address_N: Tensor
    calls_P: Tensor

    def holds(self, x_TD: Tensor) -> bool:
        return x_TD.nbytes <= (HALF_BYTES if self.size == 2 else HALF_BYTES_OF_MANY)
