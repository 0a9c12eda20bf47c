"""Decides which part of every adapter one tensor-parallel rank holds, in both layouts of vLLM's fully_sharded_loras.

Off: A is whole and B has the rank's own outputs, where the base is divided by output (q, k, v, gate, up). A has the
rank's own inputs and B is whole, where the base is divided by input (o, down). There is no collective but the base's
own.

On: the other matrix is divided too, A by LoRA rank or B by output. So nothing is held twice except KV heads that ranks
share. Each linear needs one more small collective, between A and B (kernels/lora/lora_layout.py).
"""

# R rank · D in features · O out features

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_layout import UNDIVIDED, LoRALayout
from lorafleet.kernels.lora.packed_lora import LinearPlace
from lorafleet.kernels.ranks.peer_areas import PeerAreas
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.model_shard import ModelShard


@dataclass(frozen=True, slots=True)
class AdapterSharding:
    """The division of adapters for one rank. A projection is named by its module path."""

    shard: ModelShard
    group: TPGroup
    fully_sharded: bool = False  # changes nothing in a group of one
    peers: PeerAreas | None = None  # as in LoRALayout

    def __post_init__(self) -> None:
        assert (self.shard.rank, self.shard.size) == (self.group.rank, self.group.size)

    def layout(self, projection: str) -> LoRALayout:
        whole = self.shard.projections[projection]
        # Attention needs the whole A of an absorbed projection for each head. Ranks whose inputs differ cannot share
        # the product with A.
        if not self._divides_both or whole.is_absorbed or whole.reads_part:
            return UNDIVIDED
        if self.shard.is_row_parallel(projection):
            return LoRALayout("reduce", self.group, self.outputs(projection)[0].start, self.peers)
        return LoRALayout("gather", self.group, peers=self.peers)

    def input(self, projection: str) -> slice:
        """Returns the columns of A that this rank holds."""
        return self.shard.input(projection)

    def outputs(self, projection: str) -> tuple[slice, ...]:
        """Returns the rows of B, in order. If the group does not divide an output evenly, the last ranks have fewer,
        or none."""
        if not (self._divides_both and self.shard.is_row_parallel(projection)):
            return self.shard.outputs(projection)
        size = self.shard.projections[projection].num_outputs
        each = -(-size // self.group.size)
        start = min(self.group.rank * each, size)
        return (slice(start, min(start + each, size)),)

    def adds_bias(self, projection: str) -> bool:
        """Returns whether this rank adds the bias. If the output is a sum over the ranks, only one of them does."""
        is_sum = self.shard.is_row_parallel(projection) or self.shard.projections[projection].reads_part
        return self.group.rank == 0 or not is_sum

    def place(self, projections: Sequence[str]) -> LinearPlace:
        """Returns the place of a packed linear's part in the whole, whatever part of A and B the rank holds."""
        outputs = tuple(self.shard.outputs(projection) for projection in projections)
        return LinearPlace(self.input(projections[0]).start, outputs)

    def part_of(self, projection: str, a_RD: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's A and B as views. B of a fused projection is a copy."""
        rows = self.layout(projection).rows(a_RD.shape[0])
        own_b = [b_OR[own] for own in self.outputs(projection)]
        return a_RD[rows, self.input(projection)], own_b[0] if len(own_b) == 1 else torch.cat(own_b)

    @property
    def _divides_both(self) -> bool:
        return self.fully_sharded and self.group.size > 1
