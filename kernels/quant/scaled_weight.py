"""Weights of 8-bit codes, e4m3 or int8, with one scale for each row of W or for each group of columns in a row.

The values are code * scale in float32. On a GPU there are four ways to multiply them, and the batch decides:

- e4m3 in bf16 models, on GPUs that multiply e4m3: kernels/quant/e4m3_linear_triton.py. x is a pair of e4m3 numbers for
  each number, which rounds nothing. If the scheme rounds activations, larger batches are rounded there.
- The largest batches of a scheme that rounds activations, with a scale per row: x is rounded with one scale for each
  token, for torch's e4m3 GEMM.
- Few tokens with other codes or dtypes: kernels/quant/scaled_linear_triton.py makes codes x's dtype, which is exact.
- Everything else: the values are written once into memory that all weights share, for cuBLAS. They are rounded to the
  serving dtype. x is not rounded.

On a CPU, the values are computed for every product.
"""

# T tokens · D in · O out · G groups of columns

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.e4m3_pairs import pair_block
from lorafleet.kernels.quant.e4m3_tuning import e4m3_tuning
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_matrix import ScaledMatrix, quantize_groups

FUSED_TOKENS = 128  # without e4m3 GEMMs, the codes are read for up to this many tokens, as in kernels/quant/nf4.py
PAIR_CAPABILITY = (9, 0)  # compute capability from which e4m3 GEMMs are used
E4M3_CAPABILITY = (8, 9)  # compute capability from which Triton converts e4m3
LEAST_GROUP = 16  # smallest group of columns of the kernels that read the codes
CHUNK_ROWS = 1024  # rows that are dequantized at a time, through float32
GEMM_ALIGNMENT = 16  # e4m3 GEMMs need multiples of this as in and out features


@dataclass(frozen=True, slots=True)
class ScaledScheme:
    """8-bit codes with scales, as a Scheme."""

    name: str = "fp8"
    code_dtype: torch.dtype = FP8  # e4m3 or int8
    block: int | None = None  # Columns of the whole matrix that share a scale, or None for one scale a row.
    rounds_x: bool = True  # Activations of many tokens may be rounded to e4m3, where GEMMs of e4m3 do it.

    def refusal(self, inputs: int) -> str | None:  # noqa: ARG002  as in Scheme
        return None

    def empty(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, scratch: Scratch
    ) -> ScaledWeight:
        return ScaledWeight(outputs, inputs, dtype, device, scratch, self)

    def quantize(self, values_OD: Tensor) -> ScaledMatrix:
        return quantize_groups(values_OD, self.code_dtype, self.group(values_OD.shape[1]))

    def common(self, other: Scheme) -> Scheme | None:
        """Returns the scheme with groups that fit the blocks of both."""
        if not isinstance(other, ScaledScheme) or other.code_dtype != self.code_dtype:
            return None
        blocks = [block for block in (self.block, other.block) if block is not None]
        block = math.gcd(*blocks) if blocks else None
        return ScaledScheme(self.name, self.code_dtype, block, self.rounds_x and other.rounds_x)

    def group(self, inputs: int) -> int:
        """Returns the columns of a part with this number of inputs that share a scale: fewer where it cuts blocks."""
        return inputs if self.block is None else math.gcd(self.block, inputs)


class ScaledWeight(nn.Module):
    """A weight of 8-bit codes, or a rank's part of it. `scratch` is memory for values that all weights share."""

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
        scheme: ScaledScheme,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.group = scheme.group(inputs)
        self.code_OD = _held(outputs, inputs, dtype=scheme.code_dtype, device=device)
        self.scale_OG = _held(outputs, inputs // self.group, dtype=torch.float32, device=device)
        self._scratch = scratch
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self._reads_codes = (
            device.type == "cuda"
            and (scheme.code_dtype == torch.int8 or capability >= E4M3_CAPABILITY)
            and (self.group == inputs or self.group % LEAST_GROUP == 0)
        )
        is_e4m3 = (
            scheme.code_dtype == FP8
            and capability >= PAIR_CAPABILITY
            and dtype == torch.bfloat16  # pairs hold its 8 bits, and it is the only output of torch's row-wise GEMM
        )
        self._exact_tokens = 0  # most tokens for which the e4m3 kernel does not round x
        self.pair_tokens = 0  # most tokens for which the e4m3 kernel is used
        if is_e4m3 and pair_block(inputs, self.group) is not None:
            self._exact_tokens, self.pair_tokens = e4m3_tuning(device).limits.of_scheme(scheme.rounds_x)
        self._rounds_rows = (
            is_e4m3
            and scheme.rounds_x
            and self.group == inputs
            and outputs % GEMM_ALIGNMENT == inputs % GEMM_ALIGNMENT == 0
        )
        if self._reads_codes and not self._rounds_rows:
            scratch.reserve(outputs * inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.code_OD)

    def fill(self, first_row: int, matrix: QuantizedMatrix, place: tuple[slice, slice]) -> None:
        """Fills the rows from first_row on with the part of the matrix at `place`."""
        assert isinstance(matrix, ScaledMatrix)
        part_OD = matrix.code[place]
        assert part_OD.dtype == self.code_OD.dtype
        own = slice(first_row, first_row + len(part_OD))
        self.code_OD[own].copy_(part_OD)
        self.scale_OG[own].copy_(matrix.scales(*place, self.group))

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        num_tokens = len(x_TD)
        if 0 < num_tokens <= self.pair_tokens:
            from lorafleet.kernels.quant.e4m3_linear_triton import e4m3_linear_triton  # optional on a CPU

            rounds_x, arrived_M = self.rounds(num_tokens), self._scratch.arrived_M
            return e4m3_linear_triton(x_TD, self.code_OD, self.scale_OG, bias_O, arrived_M, rounds_x)
        if self._rounds_rows:
            return self._rounded_linear(x_TD, bias_O)
        if self._is_fused(num_tokens):
            from lorafleet.kernels.quant.scaled_linear_triton import scaled_linear_triton

            return scaled_linear_triton(x_TD, self.code_OD, self.scale_OG, bias_O)
        return F.linear(x_TD, self._values(), bias_O)

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        if self._rounds_rows or self._is_fused(len(x_TD)):
            return y_TO.add_(self.linear(x_TD, None))
        return y_TO.addmm_(x_TD, self._values().T)

    def rounds(self, num_tokens: int) -> bool:
        """Returns whether x is rounded to e4m3 in a batch of this size."""
        return self._exact_tokens < num_tokens and (self._rounds_rows or num_tokens <= self.pair_tokens)

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        code_OD, scale_OG = self.code_OD[rows], self.scale_OG[rows]
        out_OD = torch.empty(code_OD.shape, dtype=self.dtype, device=code_OD.device)
        for part in (slice(first, first + CHUNK_ROWS) for first in range(0, len(out_OD), CHUNK_ROWS)):
            values_OGg = code_OD[part].float().unflatten(1, (-1, self.group)) * scale_OG[part, :, None]
            out_OD[part].copy_(values_OGg.flatten(1))
        return out_OD

    def _is_fused(self, num_tokens: int) -> bool:
        return self._reads_codes and num_tokens <= max(FUSED_TOKENS, self.pair_tokens)

    def _rounded_linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        from lorafleet.kernels.quant.scaled_linear_triton import quantize_tokens_triton

        rounded_TD, scale_T = quantize_tokens_triton(x_TD)
        product: Tensor = torch._scaled_mm(
            rounded_TD,
            self.code_OD.T,
            scale_a=scale_T[:, None],
            scale_b=self.scale_OG.T,
            bias=bias_O,
            out_dtype=self.dtype,
        )
        return product

    def _values(self) -> Tensor:
        """Returns the values of W. On a GPU they lie in memory that the next weight overwrites."""
        if not self._reads_codes:
            return self.dequantized()
        from lorafleet.kernels.quant.scaled_linear_triton import dequantize_codes_triton

        return dequantize_codes_triton(self.code_OD, self.scale_OG, self._scratch.view(*self.code_OD.shape))


def _held(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device), requires_grad=False)
