"""Which part of every adapter one tensor-parallel rank holds, in both layouts of vLLM's fully_sharded_loras.

Off: where the base is divided by output (q, k, v, gate, up), A is whole and B has the rank's own outputs; where it is
divided by input (o, down), A has the rank's own inputs and B is whole. No collective but the base's own.
On: the other matrix is divided too, A by LoRA rank or B by output, so that nothing is held twice but KV heads that
ranks share; one more, small collective a linear, between A and B (kernels/lora_layout.py).
"""

# R rank · D in features · O out features

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lorafleet.kernels.lora_layout import UNDIVIDED, LoRALayout
from lorafleet.kernels.peer_areas import PeerAreas
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import ROW_PARALLEL, Shard


@dataclass(frozen=True, slots=True)
class AdapterSharding:
    """A projection is named by its module path, or its last name. fully_sharded changes nothing in a group of one.
    peers: as in LoRALayout."""

    shard: Shard
    group: TPGroup
    fully_sharded: bool = False
    peers: PeerAreas | None = None

    def __post_init__(self) -> None:
        assert (self.shard.rank, self.shard.size) == (self.group.rank, self.group.size)

    def layout(self, projection: str) -> LoRALayout:
        if not self._divides_both:
            return UNDIVIDED
        if _is_row_parallel(projection):
            return LoRALayout("reduce", self.group, self.output(projection).start, self.peers)
        return LoRALayout("gather", self.group, peers=self.peers)

    def input(self, projection: str) -> slice:
        """Columns of A."""
        return self.shard.input(projection)

    def output(self, projection: str) -> slice:
        """Rows of B. Of an output that the group does not divide, the last ranks have less, or nothing."""
        whole = self.shard.output(projection)
        if not (self._divides_both and _is_row_parallel(projection)):
            return whole
        each = -(-whole.stop // self.group.size)
        start = min(self.group.rank * each, whole.stop)
        return slice(start, min(start + each, whole.stop))

    def part_of(self, projection: str, a_RD: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's A and B, as views."""
        rows = self.layout(projection).rows(a_RD.shape[0])
        return a_RD[rows, self.input(projection)], b_OR[self.output(projection)]

    @property
    def _divides_both(self) -> bool:
        return self.fully_sharded and self.group.size > 1


def _is_row_parallel(projection: str) -> bool:
    return projection.rpartition(".")[2] in ROW_PARALLEL
