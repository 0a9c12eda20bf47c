"""The softplus of float32 numbers in Triton kernels, without overflow: log(1 + exp(x))."""

from __future__ import annotations

import triton.language as tl

from lorafleet.kernels.jit import jit


@jit()
def softplus(x: tl.tensor) -> tl.tensor:
    x = x.to(tl.float32)
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
