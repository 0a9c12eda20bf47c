"""Triton sum of shrink's splits, for ranks that exchange P: a collective needs one sum, and a smaller message.

Idea: the sum is elementwise and adds the splits in order, so its bits are those that expand would have computed.
"""

# T tokens in the step · C columns of P · K splits of shrink

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK = 1024  # elements of one program


@jit()
def summed_splits(p_ptr: tl.tensor, offsets: tl.tensor, size: tl.tensor, num_splits: tl.constexpr) -> tl.tensor:
    """Adds the splits' numbers at the offsets `at`, in the order of the splits. `size` is that of one split."""
    inside = offsets < size
    total = tl.load(p_ptr + offsets, mask=inside, other=0.0)
    for k in tl.static_range(1, num_splits):
        total += tl.load(p_ptr + tl.cast(size, tl.int64) * k + offsets, mask=inside, other=0.0)
    return total


@jit(do_not_specialize=["size"])
def _sum_kernel(
    p_ptr: tl.tensor, sum_ptr: tl.tensor, size: tl.tensor, num_splits: tl.constexpr, block: tl.constexpr
) -> None:
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(sum_ptr + offsets, summed_splits(p_ptr, offsets, size, num_splits), mask=offsets < size)


def sum_splits(p_KTC: Tensor) -> Tensor:
    """Sums shrink's [K, T, C] to P [T, C]. What shrink left unwritten stays meaningless."""
    splits, *shape = p_KTC.shape
    if splits == 1:
        return p_KTC[0]
    p_TC = torch.empty(shape, dtype=p_KTC.dtype, device=p_KTC.device)
    _sum_kernel[(triton.cdiv(p_TC.numel(), BLOCK),)](p_KTC, p_TC, p_TC.numel(), num_splits=splits, block=BLOCK)
    return p_TC
