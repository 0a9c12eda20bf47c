"""Describes a linear of a layer by its name and sizes, from which the division among ranks and the modules of adapters
follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Units:
    """One dimension of a linear. Ranks divide its units, such as heads, but never cut one."""

    count: int
    size: int = 1  # numbers in each unit

    @property
    def total(self) -> int:
        return self.count * self.size


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear of a layer as checkpoints and adapters name it."""

    name: str  # module path below the layer, such as "self_attn.q_proj"
    inputs: Units
    outputs: tuple[Units, ...]  # several if the checkpoint has several projections fused in this one
    has_bias: bool = False
    split: Literal["outputs", "inputs", "nothing"] = "outputs"  # what tensor-parallel ranks divide
    # Queries and results of attention are multiplied by the weight, in place of the cached keys and values.
    is_absorbed: bool = False
    # Inputs are one rank's part of a sum over the ranks, and so are outputs, though every rank has the whole weight.
    reads_part: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out) of the projection."""
        return self.inputs.total, self.num_outputs

    @property
    def num_outputs(self) -> int:
        return sum(units.total for units in self.outputs)
