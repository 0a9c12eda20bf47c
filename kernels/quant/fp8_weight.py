"""FP8 weights are e4m3 numbers, with one scale for each row of W.

For few tokens, kernels/quant/fp8_linear_triton.py reads the eight bits and rounds nothing else. For many tokens, the
tensor cores multiply e4m3 by e4m3, so x is rounded to e4m3 too, with one scale for each token. On a CPU, and on GPUs
without e4m3 GEMMs, the numbers are converted to the serving dtype first.
"""

# T tokens · D in · O out

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.quant.base_weight import QuantizedMatrix
from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX

FUSED_TOKENS = 16  # for more tokens, rounding x and e4m3 GEMMs are faster
ROW_WISE_CAPABILITY = (9, 0)  # compute capability from which GPUs multiply e4m3 with scales by row
CHUNK_ROWS = 1024  # rows that are dequantized at a time, through float32
GEMM_ALIGNMENT = 16  # e4m3 GEMMs need multiples of this as in and out features


@dataclass(frozen=True, slots=True)
class FP8Matrix:
    """A whole W in e4m3, as a QuantizedMatrix."""

    weight_OD: Tensor  # e4m3
    scale_O: Tensor  # float32

    def get_shape(self) -> list[int]:
        return list(self.weight_OD.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        return self.values()[place]

    def values(self) -> Tensor:
        """Returns the values of W as [O, D], float32."""
        return self.weight_OD.float() * self.scale_O[:, None]


def quantize_rows(values_OD: Tensor) -> FP8Matrix:
    """Quantizes each row so that its largest magnitude becomes e4m3's largest number.

    x [T, D] is quantized by token in the same way.
    """
    scale_O = values_OD.abs().amax(dim=1).float().clamp(min=1e-12) / FP8_MAX
    scaled_OD = (values_OD.float() / scale_O[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return FP8Matrix(scaled_OD.to(FP8), scale_O)


class FP8Weight(nn.Module):
    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        weight_OD = torch.zeros(outputs, inputs, dtype=FP8, device=device)
        self.weight_OD = nn.Parameter(weight_OD, requires_grad=False)
        self.scale_O = nn.Parameter(torch.zeros(outputs, dtype=torch.float32, device=device), requires_grad=False)
        self._multiplies_e4m3 = (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= ROW_WISE_CAPABILITY
            and dtype == torch.bfloat16  # the only output dtype of the row-wise GEMM
            and outputs % GEMM_ALIGNMENT == inputs % GEMM_ALIGNMENT == 0
        )

    @property
    def num_outputs(self) -> int:
        return len(self.weight_OD)

    def fill(self, first_row: int, matrix: QuantizedMatrix, place: tuple[slice, slice]) -> None:
        """Fills the rows from first_row on with the part of the matrix at `place`."""
        assert isinstance(matrix, FP8Matrix)
        part_OD = matrix.weight_OD[place]
        own = slice(first_row, first_row + len(part_OD))
        self.weight_OD.data[own].copy_(part_OD)
        self.scale_O.data[own].copy_(matrix.scale_O[place[0]])

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        if not self._multiplies_e4m3:
            return F.linear(x_TD, self.dequantized(), bias_O)
        from lorafleet.kernels.quant.fp8_linear_triton import (  # triton is optional on a CPU
            fp8_linear_triton,
            quantize_tokens_triton,
        )

        if len(x_TD) <= FUSED_TOKENS:
            return fp8_linear_triton(x_TD, self.weight_OD, self.scale_O, bias_O)
        rounded_TD, scale_T = quantize_tokens_triton(x_TD)
        product: Tensor = torch._scaled_mm(
            rounded_TD,
            self.weight_OD.T,
            scale_a=scale_T[:, None],
            scale_b=self.scale_O[None, :],
            bias=bias_O,
            out_dtype=self.dtype,
        )
        return product

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        return y_TO.add_(self.linear(x_TD, None))

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        weight_OD, scale_O = self.weight_OD[rows], self.scale_O[rows]
        out_OD = torch.empty(weight_OD.shape, dtype=self.dtype, device=weight_OD.device)
        for part in (slice(first, first + CHUNK_ROWS) for first in range(0, len(out_OD), CHUNK_ROWS)):
            out_OD[part].copy_(FP8Matrix(weight_OD[part], scale_O[part]).values())
        return out_OD
