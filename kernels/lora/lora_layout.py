"""The division of one packed linear's adapters over the ranks of a tensor-parallel group, and the step between A and B
that follows from it. There are three kinds of exchange:

- none: P = A @ x is whole here (A is undivided), or it is a partial sum that the base's own all-reduce completes after
  B.
- gather: A is divided by LoRA rank, into parts of ceil(rank / N) rows. The last part may be short or empty. A part has
  the same columns of P on every rank, so each slice's columns have one fixed place in the gathered [N, T, C].
- reduce: A is divided by input, so each rank has a partial sum of P. B is divided by output.

gather and reduce are the two layouts of vLLM's fully_sharded_loras: S-LoRA, arXiv 2311.03285.
"""

# N parts · T tokens · C columns of P · R rank

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from lorafleet.kernels.ranks.peer_areas import PeerAreas


class Collectives(Protocol):
    """The collectives that an exchange needs. workers/tp/group.py implements them for real ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over all ranks in place, and returns it."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns every rank's x as [N, *shape], in rank order. All ranks pass the same shape."""


@dataclass(frozen=True, slots=True)
class LoRALayout:
    """One linear's division over the ranks, as this rank sees it."""

    exchange: Literal["none", "gather", "reduce"] = "none"
    group: Collectives | None = None
    first_column: int = 0  # column of the base linear's output at which B's rows begin
    # Memory for kernels/lora/lora_exchange.py; None if the ranks' GPUs cannot reach each other's memory.
    peers: PeerAreas | None = None

    def __post_init__(self) -> None:
        assert (self.exchange == "none") == (self.group is None)

    @property
    def exchanges(self) -> bool:
        return self.group is not None

    @property
    def num_parts(self) -> int:
        """The number of parts into which A's rows are divided."""
        return self.group.size if self.group is not None and self.exchange == "gather" else 1

    @property
    def part(self) -> int:
        """The index of the part that this rank holds."""
        return self.group.rank if self.group is not None and self.exchange == "gather" else 0

    def columns(self, rank: int) -> int:
        """Returns the number of columns of P in each part of a slice of that rank."""
        return -(-rank // self.num_parts)

    def rows(self, rank: int, part: int | None = None) -> slice:
        """Returns the rows of a slice's A that lie in the given part; the default is this rank's part."""
        size = self.columns(rank)
        start = min((self.part if part is None else part) * size, rank)
        return slice(start, min(start + size, rank))

    def num_rows(self, rank: int) -> int:
        size = self.columns(rank)
        return min(max(rank - self.part * size, 0), size)

    def exchanged(self, p_TC: Tensor) -> Tensor:
        """Returns the complete P of all parts as [N, T, C].

        Unless `exchange` is none, this is a collective. It may overwrite p.
        """
        if self.group is None:
            return p_TC.unsqueeze(0)
        if self.exchange == "gather":
            return self.group.all_gather(p_TC)
        return self.group.all_reduce(p_TC.float()).to(p_TC.dtype).unsqueeze(0)


UNDIVIDED = LoRALayout()
