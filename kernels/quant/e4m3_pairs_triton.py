"""Pairs of e4m3 numbers on the GPU: x is split within the kernel that multiplies it, or by one that stores the pairs.

Idea: scales are made of the exponent's bits of the largest number, so multiplying by them rounds nothing. The numbers
of a pair are neighboring columns of one product. Tensor cores then read W once for both, and leave both products in
one thread.

kernels/quant/e4m3_pairs.py has the twin, and says what is exact.
"""

# T tokens · N numbers of a pair · D in · B blocks of columns

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.linear_tuning import may_start_early
from lorafleet.kernels.linear.split_sums_triton import early_launch
from lorafleet.kernels.quant.e4m3_pairs import LEAST_EXPONENT, LOW_FACTOR, E4M3Pairs
from lorafleet.kernels.quant.fp8 import FP8

ELEMENTS_A_THREAD = 16  # elements of a row; two 16-byte loads
MOST_WARPS = 16


@jit()
def _nearest(x: tl.tensor) -> tl.tensor:
    """Returns the nearest e4m3 numbers as float32, for magnitudes up to 256. Ties go to the even one.

    Converting x to e4m3 and back would do the same. But Triton 3.6 with its compiler for compute capability 9.0 then
    exchanged neighboring numbers on an H200.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 1.5 * 2**14: float32 has steps of 2**-9 there, as e4m3 has below 2**-6
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@jit()
def _split(x: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Returns high, low and the scale of blocks that lie along `axis` of x."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), axis)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF, 27)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    inverse = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = x * tl.expand_dims(inverse, axis)
    high = _nearest(scaled)
    low = ((scaled - high) * 32.0).to(tl.float8e4nv)
    return (
        high.to(tl.float8e4nv),
        low,
        scale + (largest - largest),
    )  # the difference is NaN for infinite numbers, which e4m3 has not


@jit()
def split_block(x: tl.tensor) -> tl.tensor:
    """Splits a block [d, t] for pair_product. Returns e4m3 numbers [d, 2 t], and scales [t]."""
    high, low, scale = _split(x, 0)
    # They are joined as bytes, since Triton 3.7 fails at a reshaped operand of a dot.
    pairs = tl.join(high.to(tl.uint8, bitcast=True), low.to(tl.uint8, bitcast=True))
    return tl.reshape(pairs, (x.shape[0], 2 * x.shape[1])).to(tl.float8e4nv, bitcast=True), scale


@jit()
def pair_product(code: tl.tensor, pairs: tl.tensor) -> tl.tensor:
    """Returns code [o, d] times what the pairs [d, 2 t] stand for, without the scales, [o, t]."""
    product = tl.dot(code, pairs)
    high, low = tl.split(tl.reshape(product, (code.shape[0], pairs.shape[1] // 2, 2)))
    return high + low * 0.03125


@jit()
def _split_kernel(
    x_ptr: tl.tensor,
    code_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    inputs: tl.constexpr,
    rounds_x: tl.constexpr,
    early: tl.constexpr,
    block: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, block)
    inside = d < inputs
    high, low, scale = _split(tl.load(x_ptr + token * inputs + d, mask=inside, other=0.0), 0)
    numbers: tl.constexpr = 1 if rounds_x else 2
    tl.store(code_ptr + token * numbers * inputs + d, high, mask=inside)
    if not rounds_x:
        tl.store(code_ptr + (token * 2 + 1) * inputs + d, low, mask=inside)
    tl.store(scale_ptr + token, scale)


def split_pairs_triton(x_TD: Tensor, rounds_x: bool = False) -> E4M3Pairs:
    """Splits or rounds x with one scale for each row. x is contiguous."""
    assert x_TD.is_contiguous()
    num_tokens, inputs = x_TD.shape
    code_TND = torch.empty(num_tokens, 1 if rounds_x else 2, inputs, dtype=FP8, device=x_TD.device)
    scale_TB = torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TD.device)
    block, early = triton.next_power_of_2(inputs), may_start_early(x_TD.device)
    _split_kernel[(num_tokens,)](
        x_TD,
        code_TND,
        scale_TB,
        inputs=inputs,
        rounds_x=rounds_x,
        early=early,
        block=block,
        num_warps=min(MOST_WARPS, max(1, block // (32 * ELEMENTS_A_THREAD))),
        **early_launch(early),
    )
    return E4M3Pairs(code_TND, scale_TB)


assert LOW_FACTOR == 32.0 == 1 / 0.03125 and LEAST_EXPONENT == 27 - 127  # the kernels have the same numbers
