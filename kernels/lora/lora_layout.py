"""How one packed linear's adapters are divided over the ranks of a tensor-parallel group, and the step between A and B
that follows from it.

none: P = A @ x is whole here (A undivided), or a partial sum that the base's own all-reduce completes after B.
gather: A is divided by LoRA rank, in parts of ceil(rank / N) rows of which the last may be short or empty. A part has
the same columns of P on every rank, so that the gathered [N, T, C] has each of a slice's columns at one fixed place.
reduce: A is divided by input, so each rank has a partial sum of P; B is divided by output.
These are the two layouts of vLLM's fully_sharded_loras: S-LoRA, arXiv 2311.03285.
"""

# N parts · T tokens · C columns of P · R rank

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from lorafleet.kernels.ranks.peer_areas import PeerAreas


class Collectives(Protocol):
    """workers/tp/group.py has those of real ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, *shape]: every rank's x, of one shape, in rank order."""


@dataclass(frozen=True, slots=True)
class LoRALayout:
    """first_column: where B's rows begin in the base linear's output. peers: of kernels/lora/lora_exchange.py, where
    the ranks' GPUs reach each other's memory."""

    exchange: Literal["none", "gather", "reduce"] = "none"
    group: Collectives | None = None
    first_column: int = 0
    peers: PeerAreas | None = None

    def __post_init__(self) -> None:
        assert (self.exchange == "none") == (self.group is None)

    @property
    def exchanges(self) -> bool:
        return self.group is not None

    @property
    def num_parts(self) -> int:
        """Of A's rows."""
        return self.group.size if self.group is not None and self.exchange == "gather" else 1

    @property
    def part(self) -> int:
        """Which of them this rank holds."""
        return self.group.rank if self.group is not None and self.exchange == "gather" else 0

    def columns(self, rank: int) -> int:
        """Of P, in each part of a slice of that rank."""
        return -(-rank // self.num_parts)

    def rows(self, rank: int, part: int | None = None) -> slice:
        """Of a slice's A, in this rank's part or another."""
        size = self.columns(rank)
        start = min((self.part if part is None else part) * size, rank)
        return slice(start, min(start + size, rank))

    def num_rows(self, rank: int) -> int:
        size = self.columns(rank)
        return min(max(rank - self.part * size, 0), size)

    def exchanged(self, p_TC: Tensor) -> Tensor:
        """[N, T, C]: all parts' P, complete. A collective unless exchange is none; may overwrite p."""
        if self.group is None:
            return p_TC.unsqueeze(0)
        if self.exchange == "gather":
            return self.group.all_gather(p_TC)
        return self.group.all_reduce(p_TC.float()).to(p_TC.dtype).unsqueeze(0)


UNDIVIDED = LoRALayout()
