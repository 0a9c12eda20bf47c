"""A weight of four bits for the CUDA kernels: any book of 16 values, or integers with zeros, in the kernels' own order.

It serves NF4, FP4, e2m1 (MXFP4 and NVFP4) and four-bit integers in runs of columns, in as much memory as NF4Weight and
IntWeight. Those serve what this weight does not: a CPU, a GPU without the kernels, sizes that are not multiples of 64,
and columns that are assigned to groups in any order. The weight of all experts of a mixture has the rows of one expert
after those of another (kernels/moe/expert_codes.py). Its products are in kernels/moe/moe_codes_cuda.py.

Values are book * scale, or (code - zero) * scale. The kernels that read codes round the book to the served dtype, which
is exact for integers and e2m1. They multiply sums by scales in float32, except for four_bit_dense.cu, which multiplies
the values by scales and rounds them to the served dtype. For many tokens, the values are written into memory that all
weights share, rounded as by NF4Weight and IntWeight.
"""

# T tokens · D in · O out · G groups of a row

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import QuantizedMatrix, QuantizedWeight, Scheme
from lorafleet.kernels.quant.code_tiles import (
    TILE,
    empty_codes,
    empty_numbers,
    put_codes,
    put_numbers,
    take_codes,
    take_numbers,
)
from lorafleet.kernels.quant.e2m1 import E2M1Matrix
from lorafleet.kernels.quant.e2m1_scheme import E2M1Scheme
from lorafleet.kernels.quant.four_bit_cuda import (
    MAX_PROGRAMS,
    FourBitKernels,
    FourBitVariant,
    four_bit_kernels,
    four_bit_linear,
    four_bit_values,
)
from lorafleet.kernels.quant.int_weight import IntParts, IntScheme
from lorafleet.kernels.quant.nf4 import BLOCK, NF4Matrix, NF4Scheme

BOOK_SIZE = 16
MIDDLE = 8  # the book of integers is code - MIDDLE, and has the zero of symmetric codes


def tiled_weight(
    scheme: Scheme,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    scratch: Scratch,
    num_experts: int | None = None,
) -> TiledWeight | None:
    """Returns an empty weight, or None if the scheme's own weight has to serve it.

    With num_experts, it is the weight of all experts of a mixture, and `outputs` are those of one expert.
    """
    if device.type != "cuda" or not is_tileable(scheme, outputs, inputs, dtype):
        return None
    rows, of_experts = outputs * (num_experts or 1), num_experts is not None
    weight = TiledWeight(scheme, rows, inputs, dtype, torch.device("meta"), scratch, of_experts)
    if four_bit_kernels(weight.variant, device) is None:
        return None
    return TiledWeight(scheme, rows, inputs, dtype, device, scratch, of_experts)


def empty_weight(
    scheme: Scheme, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, scratch: Scratch
) -> QuantizedWeight:
    """Returns an empty weight of this rank's sizes, of the kind that multiplies fastest on the device."""
    tiled = tiled_weight(scheme, outputs, inputs, dtype, device, scratch)
    return tiled or scheme.empty(outputs, inputs, dtype, device, scratch)


def is_tileable(scheme: Scheme, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Returns whether a TiledWeight can hold a weight of these sizes."""
    if dtype not in (torch.bfloat16, torch.float16) or outputs % TILE or inputs % TILE:
        return False
    if isinstance(scheme, IntScheme) and (scheme.bits != 4 or scheme.ordered_groups):
        return False
    if not isinstance(scheme, (NF4Scheme, E2M1Scheme, IntScheme)):
        return False
    least = 32 if isinstance(scheme, IntScheme) else 16  # zeros of groups of 16 take too much shared memory
    return _group(scheme, inputs) >= least


class TiledWeight(nn.Module):
    """A weight of four bits, or a rank's part of it, for which is_tileable() holds. dtype is the served dtype."""

    def __init__(
        self,
        scheme: Scheme,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
        of_experts: bool = False,
    ) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = outputs, inputs
        self.dtype = dtype
        self.group = _group(scheme, inputs)
        has_integers = isinstance(scheme, IntScheme)
        has_zeros = isinstance(scheme, IntScheme) and scheme.has_zeros
        groups_a_block = max(1, TILE // self.group)
        self.variant = FourBitVariant(dtype, _scale_dtype(scheme), groups_a_block, has_zeros, has_integers, of_experts)
        self.quantized_from: torch.dtype | None = None  # dtype before quantization; None until fill()
        if isinstance(scheme, IntScheme):
            self.quantized_from = scheme.dtype or dtype
        numbers = empty_numbers(outputs, inputs // self.group)
        self.codes = _held(*empty_codes(outputs, inputs, self.group), dtype=torch.uint8, device=device)
        self.scales = _held(*numbers, dtype=self.variant.scale_dtype, device=device)
        self.zeros = _held(*numbers, dtype=torch.uint8, device=device) if has_zeros else None
        self.book = _held(BOOK_SIZE, dtype=torch.float32, device=device)
        self.pairs = _held(BOOK_SIZE * BOOK_SIZE, dtype=torch.int32, device=device)  # two of the book in each, by byte
        self.tickets = _held(MAX_PROGRAMS, dtype=torch.int32, device=device)  # zeros between launches
        self.numbers = (0,) * (BOOK_SIZE // 2)  # the book in the served dtype, two values in each, for launches
        self._has_book = False  # until fill()
        self._scratch = scratch
        if device.type == "cuda":
            scratch.reserve(outputs * inputs)

    def fill(self, first_row: int, matrix: QuantizedMatrix, place: tuple[slice, slice]) -> None:
        """Fills the rows from first_row on with the part of the matrix at `place`."""
        if isinstance(matrix, (NF4Matrix, E2M1Matrix)):
            code_OD, scale_OG = matrix.part(place, self.group)
            assert self.quantized_from in (None, matrix.dtype)
            self.quantized_from = matrix.dtype
            book = matrix.book
        else:
            part = cast(IntParts, matrix).part(place)
            group_G = part.group_D[:: self.group]
            code_OD, scale_OG = part.code_OD, part.scale_OG[:, group_G]
            if self.zeros is not None:
                put_numbers(self.zeros, first_row, part.zeros()[:, group_G])
            book = torch.arange(BOOK_SIZE) - float(MIDDLE)
        put_codes(self.codes, first_row, code_OD)
        put_numbers(self.scales, first_row, scale_OG)
        if not self._has_book:  # it is the same for all parts, and a mixture is filled in tens of thousands of them
            self.book.copy_(book)
            self.pairs.copy_(pairs_of(book, self.dtype))
            self.numbers = numbers_of(book, self.dtype)
            self._has_book = True

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        kernels = self._kernels_for(x_TD)
        if kernels is not None:
            return four_bit_linear(x_TD, self, bias_O, kernels)
        return F.linear(x_TD, self._values(), bias_O)

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        if self._kernels_for(x_TD) is not None:
            return y_TO.add_(self.linear(x_TD, None))
        return y_TO.addmm_(x_TD, self._values().T)

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        first, end, _ = rows.indices(self.num_outputs)
        if self.codes.is_cuda:
            kernels = four_bit_kernels(self.variant, self.codes.device)
            assert kernels is not None
            skipped, length = first % TILE, -(-end // TILE) * TILE - first // TILE * TILE
            out_OD = torch.empty(length, self.num_inputs, dtype=self.dtype, device=self.codes.device)
            return four_bit_values(self, out_OD, first - skipped, kernels)[skipped : skipped + end - first]
        number_OD = self.book[take_codes(self.codes, rows).int()]
        if self.zeros is not None:
            number_OD = number_OD - (self._by_column(self.zeros, rows) - MIDDLE)
        return (number_OD * self._by_column(self.scales, rows)).to(self.quantized_from).to(self.dtype)

    def _kernels_for(self, x_TD: Tensor) -> FourBitKernels | None:
        """Returns the kernels that read the codes, or None if the values are written first."""
        if not x_TD.is_cuda or not len(x_TD):
            return None
        kernels = four_bit_kernels(self.variant, x_TD.device)
        assert kernels is not None  # or tiled_weight() would have returned None
        return kernels if len(x_TD) <= kernels.most_tokens else None

    def _by_column(self, tiles: Tensor, rows: slice) -> Tensor:
        return take_numbers(tiles, rows).float().repeat_interleave(self.group, dim=1)

    def _values(self) -> Tensor:
        """Returns the values of W. On a GPU they lie in memory that the next weight overwrites."""
        if not self.codes.is_cuda:
            return self.dequantized()
        kernels = four_bit_kernels(self.variant, self.codes.device)
        assert kernels is not None
        return four_bit_values(self, self._scratch.view(self.num_outputs, self.num_inputs), 0, kernels)


def pairs_of(book: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the two values that each byte names, int32 [256]. The byte's lower four bits name the lower half."""
    bits = book.to(dtype).view(torch.int16).int() & 0xFFFF
    byte = torch.arange(BOOK_SIZE * BOOK_SIZE, device=book.device)
    return bits[byte & 15] | (bits[byte >> 4] << 16)


def numbers_of(book: Tensor, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the book's values in the dtype, two in each number of 32 bits. The lower half is the first one."""
    bits = [value & 0xFFFF for value in book.to(dtype).view(torch.int16).tolist()]
    return tuple(low | high << 16 for low, high in zip(bits[::2], bits[1::2], strict=True))


def _group(scheme: Scheme, inputs: int) -> int:
    """Returns the number of columns that share a scale: 1, 2, 4, ..., 32 or a multiple of 64."""
    columns = inputs if isinstance(scheme, IntScheme) and scheme.group is None else _columns(scheme)
    group = math.gcd(columns, inputs)
    return group if group % TILE == 0 else math.gcd(group, TILE)


def _columns(scheme: Scheme) -> int:
    if isinstance(scheme, (IntScheme, E2M1Scheme)):
        return scheme.group or 0
    return BLOCK


def _scale_dtype(scheme: Scheme) -> torch.dtype:
    """Returns the smallest dtype that holds all scales exactly, as far as it is known before the weight is filled."""
    if isinstance(scheme, E2M1Scheme):
        return scheme.scale_dtype
    return (isinstance(scheme, IntScheme) and scheme.dtype) or torch.float32


def _held(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device), requires_grad=False)
