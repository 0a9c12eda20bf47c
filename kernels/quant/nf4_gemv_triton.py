"""NF4 on the GPU for one token: W @ x without tensor cores, whose operands cost more than they save.

Idea: each lane of a warp reads 16 bytes of a row, computes their 32 values in registers, and multiplies them by x in
float32. The lanes' sums are added once, at the end. The values are those of dequantized() in kernels/quant/nf4.py.

Memory: as in kernels/quant/nf4.py. 16 bytes lie in one group in each half, so groups are multiples of 16.
"""

# T tokens · H = D / 2 · O out · G numbers in a group

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.quant.nf4_triton import LOOKUP, TL_DTYPES, own_value, values

if TYPE_CHECKING:
    from lorafleet.kernels.quant.nf4 import NF4Weight

SEGMENT = 16  # bytes of a row that a lane reads at a time
BLOCK_O = 4  # one row per warp: two and four are slower on an H200


@jit()
def _nf4_gemv_kernel(
    x_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    absmax_ptr: tl.tensor,
    book_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    outputs: tl.constexpr,
    half: tl.constexpr,
    group: tl.constexpr,
    has_bias: tl.constexpr,
    quantized_from: tl.constexpr,
    block_o: tl.constexpr,
    segment: tl.constexpr,
    lookup: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    inputs: tl.constexpr = 2 * half
    o = tl.program_id(0) * block_o + tl.arange(0, block_o)
    o_inside = o < outputs
    lane = tl.arange(0, 32)
    within = lane[:, None] * segment + tl.arange(0, segment)[None, :]
    packed_row = packed_ptr + o[:, None, None].to(tl.int64) * half + within[None, :, :]
    absmax_row = absmax_ptr + o[:, None].to(tl.int64) * (inputs // group)
    own = own_value(book_ptr, lookup)
    sums = tl.zeros((block_o, 32), dtype=tl.float32)
    for first in tl.range(0, half, 32 * segment):
        inside = first + within < half
        lane_inside = o_inside[:, None] & (first + lane * segment < half)[None, :]
        packed = tl.load(packed_row + first, mask=o_inside[:, None, None] & inside[None, :, :], other=0).to(tl.int32)
        group_index = (first + lane * segment) // group
        low_max = tl.load(absmax_row + group_index[None, :], mask=lane_inside, other=0.0)
        high_max = tl.load(absmax_row + half // group + group_index[None, :], mask=lane_inside, other=0.0)
        low = values(packed, low_max[:, :, None], book_ptr, own, quantized_from, dtype, lookup).to(tl.float32)
        high = values(packed >> 4, high_max[:, :, None], book_ptr, own, quantized_from, dtype, lookup).to(tl.float32)
        x_low = tl.load(x_ptr + first + within, mask=inside, other=0.0).to(tl.float32)
        x_high = tl.load(x_ptr + half + first + within, mask=inside, other=0.0).to(tl.float32)
        sums += tl.sum(low * x_low[None, :, :] + high * x_high[None, :, :], axis=2)
    y = tl.sum(sums, axis=1)
    if has_bias:
        y += tl.load(bias_ptr + o, mask=o_inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + o, y.to(y_ptr.dtype.element_ty), mask=o_inside)


def nf4_gemv_triton(x_TD: Tensor, weight: NF4Weight, bias_O: Tensor | None) -> Tensor:
    """Returns x @ W.T + bias for one token. x is contiguous and has the weight's dtype."""
    (num_tokens, inputs), (outputs, half) = x_TD.shape, weight.packed_OH.shape
    assert num_tokens == 1 and inputs == 2 * half and weight.group % SEGMENT == 0
    assert x_TD.is_contiguous() and x_TD.dtype == weight.dtype and weight.quantized_from is not None
    y_TO = torch.empty(num_tokens, outputs, dtype=x_TD.dtype, device=x_TD.device)
    _nf4_gemv_kernel[(triton.cdiv(outputs, BLOCK_O),)](
        x_TD,
        weight.packed_OH,
        weight.absmax_OG,
        weight.book,
        x_TD if bias_O is None else bias_O,
        y_TO,
        outputs=outputs,
        half=half,
        group=weight.group,
        has_bias=bias_O is not None,
        quantized_from=TL_DTYPES[weight.quantized_from],
        block_o=BLOCK_O,
        segment=SEGMENT,
        lookup=LOOKUP,
        num_warps=4,
    )
    return y_TO
