"""Weights of four bits that the tests of four_bit.cu share."""

from __future__ import annotations

import torch

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.e2m1_scheme import MXFP4, NVFP4
from lorafleet.kernels.quant.int_weight import IntMatrix, IntScheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.tiled_weight import TiledWeight

CPU = torch.device("cpu")
BF16, F16 = torch.bfloat16, torch.float16
# Each code and size of groups, with the served dtype.
CASES: dict[str, tuple[Scheme, torch.dtype]] = {
    "nf4": (NF4Scheme(), BF16),
    "int4 with zeros, groups of 128": (IntScheme(4, 128, True, 0, F16), BF16),
    "int4 with zeros, groups of 32": (IntScheme(4, 32, True, 0, BF16), F16),
    "int4 without zeros, groups of 64": (IntScheme(4, 64, False, 0, torch.float32), BF16),
    "int4 with one scale for a row": (IntScheme(4, None, False, 0, F16), F16),
    "mxfp4": (MXFP4, BF16),
    "nvfp4": (NVFP4, BF16),
}


def random_matrix_of(scheme: Scheme, outputs: int, inputs: int) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(3)
    if isinstance(scheme, IntScheme):
        groups = inputs // (scheme.group or inputs)
        code = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        # 16 is a zero that GPTQ's first format can have.
        zero = torch.randint(0, 17, (outputs, groups), generator=generator, dtype=torch.uint8)
        scale = (torch.rand(outputs, groups, generator=generator) + 0.5).to(scheme.dtype)
        group_D = torch.arange(inputs) // (inputs // groups)
        return IntMatrix(code, scale, zero if scheme.has_zeros else None, group_D, 4)
    matrix = scheme.quantize(torch.randn(outputs, inputs, generator=generator))
    if scheme is MXFP4:  # whose scales are powers of two
        matrix.scale.copy_(torch.exp2(matrix.scale.log2().round()))
    return matrix


def filled(
    scheme: Scheme,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    of_experts: bool = False,
) -> TiledWeight:
    """Returns a weight that was filled in two parts, of which one ends within a tile."""
    weight = TiledWeight(scheme, outputs, inputs, dtype, device, Scratch(dtype, device), of_experts)
    matrix = random_matrix_of(scheme, outputs, inputs)
    for rows in (slice(0, 24), slice(24, outputs)):
        weight.fill(rows.start, matrix, (rows, slice(0, inputs)))
    return weight
