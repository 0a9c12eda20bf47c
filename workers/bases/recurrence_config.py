"""Describes recurrent layers besides the gated delta rule (layer_config.py): Mamba-2's state space, and LFM2's short
convolution.

A family fills these descriptions from a config.json, as it does those of attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from lorafleet.workers.bases.projection import Projection, Units

# "gated": silu of the gate multiplies the state space's result, and the product is normed. "before_gate": the result is
# normed, and then multiplied. None: the result is multiplied, and there is no norm.
GateNorm = Literal["gated", "before_gate"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of the state that a recurrent layer has for each sequence."""

    conv: tuple[int, int]  # channels, and earlier tokens that the convolution reads; in the model's dtype
    # value heads, numbers of a key, numbers of a value; in float32. All are 0 if the layer has a convolution alone.
    memory: tuple[int, int, int] = (0, 0, 0)

    def num_bytes(self, itemsize: int) -> int:
        """Returns the bytes of one sequence's state in a model whose numbers have `itemsize` bytes."""
        return math.prod(self.conv) * itemsize + math.prod(self.memory) * 4


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers that multiply the input of a state space's first linear and the parts of its output."""

    x_in: float = 1.0
    gate: float = 1.0
    x: float = 1.0
    k: float = 1.0
    q: float = 1.0
    dt: float = 1.0

    @property
    def of_parts(self) -> tuple[float, ...]:
        """Those of the first linear's parts, in the order of Mamba2Config.in_units."""
        return self.gate, self.x, self.k, self.q, self.dt


NO_MULTIPLIERS = Multipliers()


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Describes a layer with Mamba-2's state space behind a short convolution (kernels/recurrent/state_space.py).

    Each group of k and q serves num_heads / num_groups consecutive heads. Modules are below mamba.
    Source: Mamba-2, arXiv 2405.21060.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int  # numbers of a k and of a q, which the paper calls B and C
    conv_size: int  # tokens that the convolution reads, with the current one
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    norm: GateNorm | None = "gated"  # each group's heads are normed together
    multipliers: Multipliers = NO_MULTIPLIERS

    @property
    def inner(self) -> Units:
        return Units(self.num_heads, self.head_dim)

    @property
    def conv_units(self) -> tuple[Units, ...]:
        """The channels of the convolution: x, k, q."""
        keys = Units(self.num_groups, self.state_size)
        return self.inner, keys, keys

    @property
    def in_units(self) -> tuple[Units, ...]:
        """The outputs of the first linear: the gate, the convolution's channels, dt."""
        return self.inner, *self.conv_units, Units(self.num_heads)

    @property
    def num_channels(self) -> int:
        return sum(units.total for units in self.conv_units)

    @property
    def state(self) -> StateShape:
        return StateShape((self.num_channels, self.conv_size - 1), (self.num_heads, self.state_size, self.head_dim))

    @property
    def divided_sizes(self) -> dict[str, int]:
        """The sizes that tensor parallelism divides, by their names in messages."""
        return {"number of Mamba heads": self.num_heads}

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the projections, grouped into those that one GEMM computes together."""
        hidden = Units(hidden_size)
        return (
            (Projection("mamba.in_proj", hidden, self.in_units, self.in_bias),),
            (Projection("mamba.out_proj", self.inner, (hidden,), self.out_bias, split="inputs"),),
        )

    def norm_sizes(self) -> dict[str, int]:
        """Returns no sizes, since adapters cannot replace the gated norm."""
        return {}

    def divided(self, ranks: int) -> Mamba2Config:
        """Returns the part of one rank of a tensor-parallel group. `ranks` divides the heads, and divides the groups or
        is a multiple of them."""
        return replace(self, num_heads=self.num_heads // ranks, num_groups=max(1, self.num_groups // ranks))


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Describes a layer with a short convolution between two gates, as LFM2 has it. Modules are below conv.

    The first linear computes two gates and x for each channel: result = gate_out * convolution(gate_in * x).
    """

    num_channels: int
    conv_size: int  # tokens that the convolution reads, with the current one
    has_bias: bool = False  # of both linears and of the convolution

    @property
    def conv_units(self) -> tuple[Units, ...]:
        return (Units(self.num_channels),)

    @property
    def state(self) -> StateShape:
        return StateShape((self.num_channels, self.conv_size - 1))

    @property
    def divided_sizes(self) -> dict[str, int]:
        """The sizes that tensor parallelism divides, by their names in messages."""
        return {"hidden_size": self.num_channels}

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the projections, grouped into those that one GEMM computes together."""
        hidden, channels = Units(hidden_size), Units(self.num_channels)
        return (
            (Projection("conv.in_proj", hidden, (channels,) * 3, self.has_bias),),
            (Projection("conv.out_proj", channels, (hidden,), self.has_bias, split="inputs"),),
        )

    def norm_sizes(self) -> dict[str, int]:
        """Returns no sizes, since there is no norm."""
        return {}

    def divided(self, ranks: int) -> ShortConvConfig:
        """Returns the part of one rank of a tensor-parallel group, whose size divides the channels."""
        return replace(self, num_channels=self.num_channels // ranks)
