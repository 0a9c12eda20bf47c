"""The scheme of linears in MXFP4 or NVFP4."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.e2m1 import MX_GROUP, NV_GROUP, E2M1Matrix, quantize_e2m1
from lorafleet.kernels.quant.nf4 import NF4Weight


@dataclass(frozen=True, slots=True)
class E2M1Scheme:
    """e2m1 with one scale for each group of a row, as a Scheme."""

    name: str
    group: int
    scale_dtype: torch.dtype  # dtype in which the scales are held, which has all values that they can have

    def refusal(self, inputs: int) -> str | None:
        if inputs % 2 == 0:
            return None
        return (
            f"a linear with {inputs} inputs on each rank cannot be served in {self.name}, which needs an even number. "
            "Use another tensor_parallel_size."
        )

    def empty(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, scratch: Scratch) -> NF4Weight:
        return NF4Weight(outputs, inputs, dtype, device, scratch, self.group, self.scale_dtype)

    def quantize(self, values_OD: Tensor) -> E2M1Matrix:
        return quantize_e2m1(values_OD, math.gcd(self.group, values_OD.shape[1] // 2))

    def common(self, other: Scheme) -> Scheme | None:
        """Returns the scheme with the smaller groups: they divide those of the other."""
        return min(self, other, key=lambda scheme: scheme.group) if isinstance(other, E2M1Scheme) else None


MXFP4 = E2M1Scheme("mxfp4", MX_GROUP, torch.bfloat16)
NVFP4 = E2M1Scheme("nvfp4", NV_GROUP, torch.float32)
