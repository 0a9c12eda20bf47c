"""Activations as pairs of e4m3 numbers, so that tensor cores multiply them by e4m3 weights as they are stored.

A block of a token's columns has one scale, a power of two, and x = scale * (high + low / 32). e4m3 has 4 significant
bits: `high` takes the first four of a bfloat16 number and `low` the other four. A GEMM that splits x itself has blocks
of PAIR_BLOCK columns. If x is split before, a block is the token's whole row.

What is exact: let m be the largest magnitude in the block. The scale is 2**-7 times the power of two at or below m, so
that scaled numbers are below 256. A scaled number in [2**p, 2**(p + 1)) is a multiple of 2**(p - 7). What `high` leaves
of it is at most 2**(p - 4), so it has 4 bits. `low` holds it if 32 * 2**(p - 7) is at least 2**-9, the least number of
e4m3, which means that p is at least -7. So every bfloat16 number of at least 2**-14 * m is held exactly. A smaller one
is off by at most half of the least `low`, 2**-15 * scale, which is at most 2**-22 * m. Scales are at least 2**-107, so
the bound for a block with m below 2**-100 is 2**-122. An infinite number or NaN makes a token's products NaN.

Without `low`, x is rounded to e4m3, always by rows. The error of a number is at most 2**-4 of it, or 2**-10 * scale.

Products have another error: tensor cores of compute capability 9.0 keep about 14 bits of a sum of e4m3 products
(DeepSeek-V3, arXiv 2412.19437). The kernels therefore add at most PAIR_BLOCK products there and the rest in float32.
"""

# T tokens · N numbers of a pair: high and low, or high alone · D in · B blocks of columns

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8

PAIR_BLOCK = 128  # columns of a block, or fewer if fewer columns of W share a scale
LEAST_PAIR_BLOCK = 32  # columns of one e4m3 instruction of tensor cores
LOW_FACTOR = 32.0  # `low` is stored times this
LEAST_EXPONENT = -100  # blocks with smaller numbers have the scale of this exponent


class E4M3Pairs(NamedTuple):
    """Activations that were split, or rounded. Both tensors are contiguous."""

    code_TND: Tensor  # e4m3; N is 1 if x was rounded
    scale_TB: Tensor  # float32


def split_pairs(x_TD: Tensor, block: int | None = None, rounds_x: bool = False) -> E4M3Pairs:
    """Splits x by blocks of columns, of which the last may be shorter, or by rows.

    By rows, it is the twin of split_pairs_triton.
    """
    inputs = x_TD.shape[1]
    block = block or inputs
    x_TBb = F.pad(x_TD.float(), (0, -inputs % block)).unflatten(1, (-1, block))
    largest_TB1 = x_TBb.abs().amax(dim=2, keepdim=True)
    exponent_TB1 = largest_TB1.clamp(min=2.0**LEAST_EXPONENT).view(torch.int32) >> 23  # with its bias of 127
    scale_TB1 = ((exponent_TB1 - 7) << 23).view(torch.float32)
    scaled_TBb = x_TBb / scale_TB1
    high_TBb = scaled_TBb.to(FP8)
    low_TBb = ((scaled_TBb - high_TBb.float()) * LOW_FACTOR).to(FP8)
    # The scale of an infinite number is NaN, as in the kernel.
    scale_TB = torch.where(largest_TB1.isfinite(), scale_TB1, torch.nan).squeeze(2)
    parts = (high_TBb,) if rounds_x else (high_TBb, low_TBb)
    return E4M3Pairs(torch.stack([part.flatten(1)[:, :inputs] for part in parts], dim=1), scale_TB)


def joined(pairs: E4M3Pairs, block: int | None = None) -> Tensor:
    """Returns the x that the pairs stand for, float32 [T, D]."""
    high_TD, *low = pairs.code_TND.float().unbind(1)
    scaled_TD = high_TD + low[0] / LOW_FACTOR if low else high_TD
    inputs = scaled_TD.shape[1]
    return scaled_TD * pairs.scale_TB.repeat_interleave(block or inputs, dim=1)[:, :inputs]


def pair_block(inputs: int, group: int) -> int | None:
    """Returns the columns of a block if `group` columns of W share a scale, or None if the kernels do not take it."""
    block = PAIR_BLOCK
    while group < inputs and group % block:
        block //= 2
    return block if block >= LEAST_PAIR_BLOCK else None
