"""NF4 weights have four bits per number. The bits select one of 16 values of a book, which is multiplied by the
largest magnitude of the number's block.

Blocks are 64 numbers long and run along the rows of the whole matrix, one row after the other, as in bitsandbytes. FP4
checkpoints differ in the book alone, and those in e2m1 (kernels/quant/e2m1.py) in the book and the blocks' length. A
rank's part of a matrix has the same values as the whole: each group of a row lies in one block and carries that block's
magnitude.

Memory: packed is [O, D/2]. Byte j of a row holds number j in its lower four bits and number j + D/2 in its upper ones,
so that both halves of a tile of bytes are numbers side by side. absmax is [O, D/G], float32, with double quantization
undone; MXFP4's powers of two are bfloat16.

The values are book * absmax in float32, rounded to the dtype that was quantized, then to the served one. For few
tokens, kernels/quant/nf4_triton.py reads the four bits. For many, it pays to write the values once into memory that
all weights share, and to call cuBLAS.
Source: QLoRA, arXiv 2305.14314.
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
from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme, Sliceable
from lorafleet.kernels.quant.e2m1 import E2M1Matrix

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
LEAST_GROUP = 16  # smallest group of the kernels that read the four bits
FUSED_TOKENS = 128  # up to this many tokens the four bits are read; for more, the values are written first


@dataclass(frozen=True, slots=True)
class NF4Matrix:
    """A whole W in NF4, as a QuantizedMatrix."""

    code: Sliceable  # uint8, 0 to 15, [O, D]: a tensor, or one in a file, of which a rank reads its part
    absmax_B: Tensor  # float32
    book: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype  # dtype of the numbers before quantization
    block: int = BLOCK

    def part(self, place: tuple[slice, slice], group: int) -> tuple[Tensor, Tensor]:
        """Returns the codes [O, D] at `place`, and the magnitudes of each `group` columns, which lie in one block."""
        rows, columns = place
        groups = slice(columns.start // group, columns.stop // group)
        return self.code[place], self._absmax(rows, group)[:, groups]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        """Returns the values of W at `place` in dtype."""
        rows, columns = (slice(0, size) for size in self.shape) if place is ... else place
        size = math.gcd(self.block, self.shape[1])
        absmax_OD = self._absmax(rows, size).repeat_interleave(size, dim=1)[:, columns]
        return (self.book[self.code[rows, columns].int()] * absmax_OD).to(self.dtype)

    def _absmax(self, rows: slice, size: int) -> Tensor:
        """Returns the magnitudes [O, D/size] of these rows' groups of `size` numbers. Each group lies in one block."""
        inputs = self.shape[1]
        assert math.gcd(self.block, inputs) % size == 0
        groups, in_block = inputs // size, self.block // size
        first, end = rows.start * groups, rows.stop * groups
        of_group = self.absmax_B[first // in_block : -(-end // in_block)].repeat_interleave(in_block)
        return of_group[first % in_block :][: end - first].view(-1, groups)


def quantize(values_OD: Tensor) -> NF4Matrix:
    """Quantizes to the nearest of the book's values, as bitsandbytes does."""
    book = torch.tensor(NF4_BOOK, device=values_OD.device)
    flat = values_OD.float().flatten()
    padded = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    absmax_B = padded.abs().amax(dim=1)
    scaled = (padded * (1.0 / absmax_B.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
    code = _nearest(scaled, (book[1:] + book[:-1]) / 2)
    shape = values_OD.shape[0], values_OD.shape[1]
    return NF4Matrix(code.flatten()[: len(flat)].view(shape), absmax_B, book, shape, values_OD.dtype)


def _nearest(scaled: Tensor, middles: Tensor) -> Tensor:
    """Returns the index of the value nearest to each number, uint8. `middles` lie between the values."""
    if scaled.is_cuda:
        return torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8)
    # On a CPU, a binary search for each number takes four times as long as comparisons with all middles. These are
    # vectorized if their results are floats, 0 or 1.
    index, is_above = torch.zeros_like(scaled), torch.empty_like(scaled)
    for middle in middles.tolist():
        index += torch.gt(scaled, middle, out=is_above)
    return index.to(torch.uint8)


@dataclass(frozen=True, slots=True)
class NF4Scheme:
    """NF4, FP4 or another book, as a Scheme.

    A weight has one book, and its numbers had one dtype before quantization, so schemes that differ in these have
    nothing in common.
    """

    name: str = "nf4"
    book: tuple[float, ...] = NF4_BOOK
    dtype: torch.dtype | None = None  # dtype of a stored matrix before quantization; None if values are quantized here

    def refusal(self, inputs: int) -> str | None:
        if inputs % 2 == 0:
            return None
        return (
            f"a linear with {inputs} inputs on each rank cannot be quantized to nf4, which needs an even number. "
            "Use quantization=fp8, or another tensor_parallel_size."
        )

    def empty(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, scratch: Scratch) -> NF4Weight:
        return NF4Weight(outputs, inputs, dtype, device, scratch)

    def quantize(self, values_OD: Tensor) -> NF4Matrix:
        return quantize(values_OD)

    def common(self, other: Scheme) -> Scheme | None:
        return self if self == other else None


class NF4Weight(nn.Module):
    """A weight in NF4, or a rank's part of it.

    The groups divide both halves of a row, so they fit any columns that a rank holds. dtype is the served dtype.
    `scratch` is shared by all weights of the model. `block` is the number of columns that share a magnitude.
    `absmax_dtype` is one that holds all magnitudes exactly.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
        block: int = BLOCK,
        absmax_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        assert inputs % 2 == 0
        self.group = math.gcd(block, inputs // 2)
        self.dtype = dtype
        self.quantized_from: torch.dtype | None = None  # dtype before quantization; None until fill()
        self.packed_OH = _held(outputs, inputs // 2, dtype=torch.uint8, device=device)
        self.absmax_OG = _held(outputs, inputs // self.group, dtype=absmax_dtype, device=device)
        self.book = _held(len(NF4_BOOK), dtype=torch.float32, device=device)
        self._scratch = scratch
        if device.type == "cuda":
            scratch.reserve(outputs * inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.packed_OH)

    def fill(self, first_row: int, matrix: QuantizedMatrix, place: tuple[slice, slice]) -> None:
        """Fills the rows from first_row on with the part of the matrix at `place`."""
        assert isinstance(matrix, (NF4Matrix, E2M1Matrix))
        code_OD, absmax_OG = matrix.part(place, self.group)
        half = code_OD.shape[1] // 2
        own = slice(first_row, first_row + len(code_OD))
        self.packed_OH[own].copy_(code_OD[:, :half] | (code_OD[:, half:] << 4))
        self.absmax_OG[own].copy_(absmax_OG)
        assert self.quantized_from in (None, matrix.dtype)
        self.quantized_from = matrix.dtype
        self.book.copy_(matrix.book)

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        if self._is_fused(x_TD):
            from lorafleet.kernels.quant import nf4_gemv_triton, nf4_triton  # triton is optional on a CPU

            single = len(x_TD) == 1
            return (nf4_gemv_triton.nf4_gemv_triton if single else nf4_triton.nf4_linear_triton)(x_TD, self, bias_O)
        return F.linear(x_TD, self._values(), bias_O)

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        if self._is_fused(x_TD):
            return y_TO.add_(self.linear(x_TD, None))
        return y_TO.addmm_(x_TD, self._values().T)

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        if self.packed_OH.is_cuda:  # the operators below would need many times the values' memory
            from lorafleet.kernels.quant.nf4_triton import dequantize_triton

            first, end, _ = rows.indices(self.num_outputs)
            out_OD = torch.empty(end - first, 2 * self.packed_OH.shape[1], dtype=self.dtype, device=self.book.device)
            return dequantize_triton(self, out_OD, first)
        packed_OH = self.packed_OH[rows]
        code_OD = torch.cat([packed_OH & 15, packed_OH >> 4], dim=1)
        absmax_OD = self.absmax_OG[rows].repeat_interleave(self.group, dim=1)
        return (self.book[code_OD.int()] * absmax_OD).to(self.quantized_from).to(self.dtype)

    def _is_fused(self, x_TD: Tensor) -> bool:
        return x_TD.is_cuda and len(x_TD) <= FUSED_TOKENS and self.group % LEAST_GROUP == 0

    def _values(self) -> Tensor:
        """Returns the values of W. On a GPU they lie in memory that the next weight overwrites."""
        if not self.packed_OH.is_cuda:
            return self.dequantized()
        from lorafleet.kernels.quant.nf4_triton import dequantize_triton

        out_OD = self._scratch.view(len(self.packed_OH), 2 * self.packed_OH.shape[1])
        return dequantize_triton(self, out_OD)


def _held(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device), requires_grad=False)
