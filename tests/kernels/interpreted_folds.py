"""Kernels that fold a [4, 8] matrix with a function of their own, which does not commute."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chain(scale_a, shift_a, scale_b, shift_b):
    """Composes two maps x -> scale * x + shift, the first one first."""
    return scale_a * scale_b, shift_a * scale_b + shift_b


@triton.jit
def fold_kernel(scale_ptr, shift_ptr, out_ptr, axis: tl.constexpr, scans: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    scale, shift = tl.load(scale_ptr + at), tl.load(shift_ptr + at)
    if scans:
        scale, shift = tl.associative_scan((scale, shift), axis, _chain)
    else:
        scale, shift = tl.reduce((scale, shift), axis, _chain, keep_dims=True)
    tl.store(out_ptr + at, shift + tl.zeros([4, 8], tl.float32))
