"""Holds the weights that an adapter has for one base linear, as one rank has them. This file owns only the shapes.
reader.py reads and checks the values, and lora_model.py takes a rank's part."""

# R rank · D in features · O out features

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of A [rows, inputs] and B [outputs, rank] on one rank, and their scaling."""

    rows: int
    inputs: int
    outputs: int
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class LoRALayerWeights:
    """A low-rank update, y += scaling * B (A x). Both matrices are in the serving dtype, on the CPU, with contiguous
    rows.

    In a tensor-parallel group they are the rank's part (workers/tp/adapter_sharding.py), so A may have fewer rows than
    B has columns.
    """

    a_RD: Tensor
    b_OR: Tensor
    scaling: float  # alpha/r, or alpha/sqrt(r) for rsLoRA; not multiplied into B, since that would round B
    row_scale_R: Tensor | None = None  # FP8 weights only, float32: factor of B A's terms for each row of A here

    def __post_init__(self) -> None:
        assert self.a_RD.shape[0] <= self.b_OR.shape[1]
        assert self.row_scale_R is None or len(self.row_scale_R) == len(self.a_RD)

    @property
    def sizes(self) -> PairSizes:
        return PairSizes(self.a_RD.shape[0], self.in_features, self.out_features, self.rank, self.scaling)

    @property
    def rank(self) -> int:
        return self.b_OR.shape[1]

    @property
    def in_features(self) -> int:
        return self.a_RD.shape[1]

    @property
    def out_features(self) -> int:
        return self.b_OR.shape[0]


@dataclass(frozen=True, slots=True)
class AffineWeights:
    """A change y = scale_O * y + bias_O, where y is without the base's bias: LinearForm in forms.py. Both vectors are
    float32 and cover this rank's outputs."""

    scale_O: Tensor | None  # None means 1.
    bias_O: Tensor | None  # None if the bias is the base's own, or if another rank adds it.
