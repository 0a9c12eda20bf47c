"""One base linear's share of an adapter, as one rank has it. Owns nothing but the shapes; reader.py reads and checks
the values, lora_model.py takes a rank's part."""

# R rank · D in features · O out features

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoRALayerWeights:
    """y += scaling * B (A x). Both tensors are in the serving dtype, on the CPU; each row is contiguous.

    Of a rank of a tensor-parallel group they are its part (workers/tp/adapter_sharding.py): A may have fewer rows.
    scaling is alpha/r, or alpha/sqrt(r) for rsLoRA; it is kept apart from B, since multiplying it in would round B.
    row_scale_R: of FP8 weights only, float32 for each row of A here: what B A's terms are multiplied by.
    """

    a_RD: Tensor
    b_OR: Tensor
    scaling: float
    row_scale_R: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.a_RD.shape[0] <= self.b_OR.shape[1]
        assert self.row_scale_R is None or len(self.row_scale_R) == len(self.a_RD)

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
    """y = scale_O * y + bias_O, where y is without the base's bias: forms.py's LinearForm. float32, this rank's
    outputs. scale_O None: 1. bias_O None: the base's own, or another rank adds it."""

    scale_O: Tensor | None
    bias_O: Tensor | None
