"""Integer weights have codes of four or eight bits per number. A value is (code - zero) * scale, where each group of a
row's columns has one scale and one zero.

Usually a group is a run of 32, 64 or 128 columns or a whole row. GPTQ's desc_act and compressed-tensors' actorder
assign columns to groups in any order. Then the weight holds each column's group, and the kernels look the scale up by
column. The columns of W stay where they are, for two reasons: a rank's columns rarely make up whole groups in that
case, and x would need a launch of its own to be permuted.

Memory: with four bits, packed is [O, D/2]. Byte j of a row holds number j in its lower four bits and number j + D/2 in
its upper ones, as in kernels/quant/nf4.py. With eight bits, packed is [O, D]. scale is float32 and zero is uint8, both
[O, groups]. On a rank, groups are divided until they lie in its columns.

The values are computed in float32, rounded to the dtype of the file's scales, then to the served one. For few tokens,
kernels/quant/int_triton.py reads the codes. For many, the values are written into memory that all weights share.
Sources: GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978.
"""

# T tokens · D in · O out · G groups of a row · P projections that share the weight

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme

Bits = Literal[4, 8]
ROUNDED_GROUP = 128  # columns of a group when plain values are quantized
MAX_PROJECTIONS = 3  # q, k and v share a weight
FUSED_TOKENS = 128  # up to this many tokens the codes are read; for more, the values are written first


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """W or a part of it, as a QuantizedMatrix."""

    code_OD: Tensor  # uint8
    scale_OG: Tensor  # in the dtype to which values are rounded
    zero_OG: Tensor | None  # uint8; None means 2 ** (bits - 1)
    group_D: Tensor  # int64, each column's group
    bits: Bits

    def get_shape(self) -> list[int]:
        return list(self.code_OD.shape)

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        if place is ...:
            return self.values()
        rows, columns = place
        return self.part((rows, columns)).values()

    def part(self, place: tuple[slice, slice]) -> IntMatrix:
        rows, columns = place
        zero_OG = None if self.zero_OG is None else self.zero_OG[rows]
        return IntMatrix(self.code_OD[place], self.scale_OG[rows], zero_OG, self.group_D[columns], self.bits)

    def zeros(self) -> Tensor:
        """Returns the zeros as [O, G] uint8, also if all are the same."""
        if self.zero_OG is not None:
            return self.zero_OG
        return torch.full(self.scale_OG.shape, 1 << (self.bits - 1), dtype=torch.uint8, device=self.code_OD.device)

    def values(self) -> Tensor:
        """Returns the values as [O, D] in the scales' dtype."""
        zero_OD, scale_OD = self.zeros()[:, self.group_D], self.scale_OG[:, self.group_D]
        return ((self.code_OD.float() - zero_OD.float()) * scale_OD.float()).to(self.scale_OG.dtype)


class IntParts(QuantizedMatrix, Protocol):
    """A QuantizedMatrix of integer codes: an IntMatrix, or a matrix in a file of which only parts are read."""

    def part(self, place: tuple[slice, slice]) -> IntMatrix: ...


@dataclass(frozen=True, slots=True)
class IntScheme:
    """The Scheme of integer codes."""

    bits: Bits
    group: int | None  # columns of a group; None means whole rows
    has_zeros: bool = False  # if not, every zero is 2 ** (bits - 1)
    ordered_groups: int = 0  # number of groups in a row of the whole W if columns are assigned to groups in any order
    dtype: torch.dtype | None = None  # dtype to which values are rounded before the served one; None means no other
    max_orders: int = MAX_PROJECTIONS  # largest number of different orders of columns among the weight's rows

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def refusal(self, inputs: int) -> str | None:
        if self.bits == 8 or inputs % 2 == 0:
            return None
        return (
            f"a linear with {inputs} inputs on each rank cannot be held in int4, which needs an even number. Use "
            "another tensor_parallel_size."
        )

    def empty(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, scratch: Scratch) -> IntWeight:
        return IntWeight(self, outputs, inputs, dtype, device, scratch)

    def quantize(self, values_OD: Tensor) -> IntMatrix:
        return round_to_nearest(values_OD, self.bits, self.group)

    def common(self, other: Scheme) -> Scheme | None:
        """Returns eight bits for four and eight, and small groups for large ones. It does not mix runs and orders."""
        if not isinstance(other, IntScheme) or self.dtype != other.dtype:
            return None
        if bool(self.ordered_groups) != bool(other.ordered_groups):
            return None
        return replace(
            self,
            bits=max(self.bits, other.bits),
            group=math.gcd(self.group or 0, other.group or 0) or None,
            has_zeros=self.has_zeros or other.has_zeros or self.bits != other.bits,
            ordered_groups=max(self.ordered_groups, other.ordered_groups),
        )


def round_to_nearest(values_OD: Tensor, bits: Bits, group: int | None) -> IntMatrix:
    """Quantizes so that the codes' range covers a group's largest magnitude on both sides of zero.

    If `group` does not divide the inputs, the groups have the greatest common divisor of both.
    """
    inputs = values_OD.shape[1]
    size, middle = math.gcd(group or inputs, inputs), 1 << (bits - 1)
    values = values_OD.float().unflatten(1, (-1, size))
    # It is a product, as torch's quotient by a number is on a GPU, so that a CPU quantizes to the same bits.
    scale_OG = (values.abs().amax(dim=2) * (1 / (middle - 0.5))).to(values_OD.dtype)
    scale_OG = scale_OG.clamp(min=torch.finfo(values_OD.dtype).tiny)  # groups of zeros
    code = (values / scale_OG.float()[:, :, None]).round_().clamp_(-middle, middle - 1) + middle
    group_D = torch.arange(inputs, device=values_OD.device) // size
    return IntMatrix(code.flatten(1).to(torch.uint8), scale_OG, None, group_D, bits)


class IntWeight(nn.Module):
    """A weight of integer codes, or a rank's part of it. dtype is the served dtype."""

    def __init__(
        self,
        scheme: IntScheme,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        super().__init__()
        self.bits, self.num_inputs = scheme.bits, inputs
        self.is_ordered = scheme.ordered_groups > 0
        self.run = inputs // 2 if scheme.bits == 4 else inputs  # columns whose codes lie side by side
        self.group = math.gcd(scheme.group or 0, self.run)  # columns of a group here
        self.dtype = dtype
        self.quantized_from = scheme.dtype or dtype
        groups = scheme.ordered_groups or inputs // self.group
        self.packed_OB = _held(outputs, self.run, dtype=torch.uint8, device=device)
        self.scale_OG = _held(outputs, groups, dtype=torch.float32, device=device)
        self.zero_OG = _held(outputs, groups, dtype=torch.uint8, device=device) if scheme.has_zeros else None
        # Each column's group by projection, and each row's projection.
        self.group_PD = _held(scheme.max_orders, inputs, dtype=torch.int32, device=device) if self.is_ordered else None
        self.projection_O = _held(outputs, dtype=torch.int32, device=device) if self.is_ordered else None
        self._num_orders = 0
        self._scratch = scratch
        if device.type == "cuda":
            scratch.reserve(outputs * inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.packed_OB)

    def fill(self, first_row: int, matrix: QuantizedMatrix, place: tuple[slice, slice]) -> None:
        """Fills the rows from first_row on with the part of the matrix at `place`."""
        part = cast(IntParts, matrix).part(place)
        own = slice(first_row, first_row + len(part.code_OD))
        low_OB, high_OB = part.code_OD[:, : self.run], part.code_OD[:, self.run :]
        self.packed_OB[own].copy_(low_OB | (high_OB << 4) if self.bits == 4 else low_OB)
        scale_OG, zero_OG = part.scale_OG, part.zeros()
        if self.group_PD is not None and self.projection_O is not None:
            self.projection_O[own] = self._order(part.group_D)
        else:
            group_G = part.group_D[:: self.group]
            scale_OG, zero_OG = scale_OG[:, group_G], zero_OG[:, group_G]
        self.scale_OG[own, : scale_OG.shape[1]].copy_(scale_OG)
        if self.zero_OG is not None:
            self.zero_OG[own, : zero_OG.shape[1]].copy_(zero_OG)

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        if self._is_fused(x_TD):
            from lorafleet.kernels.quant.int_triton import int_linear_triton  # triton is optional on a CPU

            return int_linear_triton(x_TD, self, bias_O)
        return F.linear(x_TD, self._values(), bias_O)

    def add_linear(self, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        if self._is_fused(x_TD):
            return y_TO.add_(self.linear(x_TD, None))
        return y_TO.addmm_(x_TD, self._values().T)

    def dequantized(self, rows: slice = slice(None)) -> Tensor:
        if self.packed_OB.is_cuda:  # the operators below would need many times the values' memory
            from lorafleet.kernels.quant.int_triton import dequantize_int_triton

            first, end, _ = rows.indices(self.num_outputs)
            out_OD = torch.empty(end - first, self.num_inputs, dtype=self.dtype, device=self.packed_OB.device)
            return dequantize_int_triton(self, out_OD, first)
        packed_OB, scale_OG = self.packed_OB[rows], self.scale_OG[rows]
        code_OD = torch.cat([packed_OB & 15, packed_OB >> 4], dim=1) if self.bits == 4 else packed_OB
        zero: Tensor | float = float(1 << (self.bits - 1))
        if self.zero_OG is not None:
            zero = self._by_column(self.zero_OG[rows].float(), rows)
        return ((code_OD.float() - zero) * self._by_column(scale_OG, rows)).to(self.quantized_from).to(self.dtype)

    @property
    def step(self) -> int:
        """Number of columns that kernels multiply at a time, a power of two. They are in one group or ordered.

        Ordered columns load a scale, a zero and a group for each number: 128 of them do not fit into shared memory.
        """
        return math.gcd(self.run, 64) if self.is_ordered else math.gcd(self.group, 128)

    def _is_fused(self, x_TD: Tensor) -> bool:
        return x_TD.is_cuda and len(x_TD) <= FUSED_TOKENS and self.step >= 16  # tensor cores need 16

    def _by_column(self, of_group_OG: Tensor, rows: slice) -> Tensor:
        if self.group_PD is None or self.projection_O is None:
            return of_group_OG.repeat_interleave(self.group, dim=1)
        return of_group_OG.gather(1, self.group_PD[self.projection_O[rows]].long())

    def _order(self, group_D: Tensor) -> int:
        """Returns the index of this order in group_PD, where it is added if no earlier projection has it."""
        assert self.group_PD is not None
        for index in range(self._num_orders):
            if torch.equal(self.group_PD[index], group_D.int()):
                return index
        assert self._num_orders < len(self.group_PD)
        self.group_PD[self._num_orders].copy_(group_D)
        self._num_orders += 1
        return self._num_orders - 1

    def _values(self) -> Tensor:
        """Returns the values of W. On a GPU they lie in memory that the next weight overwrites."""
        if not self.packed_OB.is_cuda:
            return self.dequantized()
        from lorafleet.kernels.quant.int_triton import dequantize_int_triton

        return dequantize_int_triton(self, self._scratch.view(self.num_outputs, self.num_inputs))


def _held(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device), requires_grad=False)
