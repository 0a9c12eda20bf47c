"""NF4: four bits a number, which name one of 16 values of a book, times the largest magnitude of the number's block.

Blocks are 64 numbers long and run along the rows of the whole matrix, one row after the other, as bitsandbytes has
them; FP4 checkpoints differ in the book alone. A rank's part of a matrix keeps the values of the whole: every row's
groups, of which each lies in one block, carry their block's magnitude.

Memory: packed [O, D/2]; byte j of a row holds number j in its lower four bits and number j + D/2 in its upper ones, so
that both halves of a tile of bytes are numbers side by side. absmax [O, D/G], float32, double quantisation undone. The
values are book * absmax in float32, rounded to the dtype that was quantised, then to the one that is served. Few tokens
are multiplied by kernels/quant/nf4_triton.py, which reads the four bits; for many it pays to write the values once into
memory that all weights share, and to call cuBLAS. Source: QLoRA, arXiv 2305.14314.
"""

# T tokens · D in · O out · B blocks · G numbers in a group

from __future__ import annotations

import math
from dataclasses import dataclass
from types import EllipsisType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import QuantisedMatrix

BLOCK = 64
# Quantiles of a normal distribution, scaled to [-1, 1]; zero is among them.
NF4_BOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
LEAST_GROUP = 16  # of the kernels that read the four bits
FUSED_TOKENS = 128  # for as many the four bits are read, for more the values are written first


@dataclass(frozen=True, slots=True)
class NF4Matrix:
    """A QuantisedMatrix. code_OD: uint8, 0 to 15. absmax_B: float32. dtype: of the numbers before."""

    code_OD: Tensor
    absmax_B: Tensor
    book: Tensor
    dtype: torch.dtype
    block: int = BLOCK

    def absmax_of_groups(self, size: int) -> Tensor:
        """[O, D/size]: of each row's groups of `size` numbers, which lie in one block each."""
        outputs, inputs = self.code_OD.shape
        assert math.gcd(self.block, inputs) % size == 0
        of_group = self.absmax_B.repeat_interleave(self.block // size)
        return of_group[: outputs * inputs // size].view(outputs, inputs // size)

    def get_shape(self) -> list[int]:
        return list(self.code_OD.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        return self.values()[place]

    def values(self) -> Tensor:
        """[O, D] in dtype."""
        size = math.gcd(self.block, self.code_OD.shape[1])
        absmax_OD = self.absmax_of_groups(size).repeat_interleave(size, dim=1)
        return (self.book[self.code_OD.int()] * absmax_OD).to(self.dtype)


def quantise(values_OD: Tensor) -> NF4Matrix:
    """To the nearest of the book's values, as bitsandbytes does."""
    book = torch.tensor(NF4_BOOK, device=values_OD.device)
    flat = values_OD.float().flatten()
    padded = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    absmax_B = padded.abs().amax(dim=1)
    scaled = (padded * (1.0 / absmax_B.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
    code = torch.bucketize(scaled, (book[1:] + book[:-1]) / 2, out_int32=True).to(torch.uint8)
    return NF4Matrix(code.flatten()[: len(flat)].view(values_OD.shape), absmax_B, book, values_OD.dtype)


class NF4Weight(nn.Module):
    """dtype: that is served. quantised_from: of the numbers before, None where nothing is filled in yet. `scratch` is
    for all weights of the model. Groups divide both halves of a row, so that they fit whatever columns a rank holds."""

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        super().__init__()
        assert inputs % 2 == 0
        self.group = math.gcd(BLOCK, inputs // 2)
        self.dtype = dtype
        self.quantised_from: torch.dtype | None = None
        self.packed_OH = _held(outputs, inputs // 2, dtype=torch.uint8, device=device)
        self.absmax_OG = _held(outputs, inputs // self.group, dtype=torch.float32, device=device)
        self.book = _held(len(NF4_BOOK), dtype=torch.float32, device=device)
        self._scratch = scratch
        if device.type == "cuda":
            scratch.reserve(outputs * inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.packed_OH)

    def fill(self, first_row: int, matrix: QuantisedMatrix, place: tuple[slice, slice]) -> None:
        """Rows from first_row on are the matrix's numbers at `place`."""
        assert isinstance(matrix, NF4Matrix)
        rows, columns = place
        code_OD = matrix.code_OD[place]
        half = code_OD.shape[1] // 2
        own = slice(first_row, first_row + len(code_OD))
        self.packed_OH[own].copy_(code_OD[:, :half] | (code_OD[:, half:] << 4))
        groups = slice(columns.start // self.group, columns.stop // self.group)
        self.absmax_OG[own].copy_(matrix.absmax_of_groups(self.group)[rows, groups])
        assert self.quantised_from in (None, matrix.dtype)
        self.quantised_from = matrix.dtype
        self.book.copy_(matrix.book)

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        if self._is_fused(x_TD):
            from lorafleet.kernels.quant import nf4_gemv_triton, nf4_triton  # triton is optional on a CPU

            one = len(x_TD) == 1
            return (nf4_gemv_triton.nf4_gemv_triton if one else nf4_triton.nf4_linear_triton)(x_TD, self, bias_O)
        return F.linear(x_TD, self._values(), bias_O)

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        if self._is_fused(x_TD):
            return y_TO.add_(self.linear(x_TD, None))
        return y_TO.addmm_(x_TD, self._values().T)

    def dequantised(self, rows: slice = slice(None)) -> Tensor:
        if self.packed_OH.is_cuda:  # the operators below would take many times the values' memory
            from lorafleet.kernels.quant.nf4_triton import dequantise_triton

            first, end, _ = rows.indices(self.num_outputs)
            out_OD = torch.empty(end - first, 2 * self.packed_OH.shape[1], dtype=self.dtype, device=self.book.device)
            return dequantise_triton(self, out_OD, first)
        packed_OH = self.packed_OH[rows]
        code_OD = torch.cat([packed_OH & 15, packed_OH >> 4], dim=1)
        absmax_OD = self.absmax_OG[rows].repeat_interleave(self.group, dim=1)
        return (self.book[code_OD.int()] * absmax_OD).to(self.quantised_from).to(self.dtype)

    def _is_fused(self, x_TD: Tensor) -> bool:
        return x_TD.is_cuda and len(x_TD) <= FUSED_TOKENS and self.group % LEAST_GROUP == 0

    def _values(self) -> Tensor:
        """On a GPU in memory that the next weight's overwrite."""
        if not self.packed_OH.is_cuda:
            return self.dequantised()
        from lorafleet.kernels.quant.nf4_triton import dequantise_triton

        out_OD = self._scratch.view(len(self.packed_OH), 2 * self.packed_OH.shape[1])
        return dequantise_triton(self, out_OD)


def _held(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device), requires_grad=False)
