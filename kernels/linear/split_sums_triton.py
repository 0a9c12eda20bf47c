"""A linear's output for the kernels that read it, which may be in sums over parts of the inputs.

Idea: these few numbers are still in the L2 cache, so the reader adds them while it loads them, instead of a kernel of
its own. The order is fixed, so every run gives the same bits.
"""

# T tokens · O out · K splits

from __future__ import annotations

from typing import Any

import triton.language as tl

from lorafleet.kernels.jit import jit


@jit()
def total(
    y_ptr: tl.tensor, offsets: tl.tensor, inside: tl.tensor, width: tl.constexpr, num_sums: tl.constexpr
) -> tl.tensor:
    """Returns the numbers at the offsets of y [T, O], or of the sum of [K, T, O], in float32.

    The grid's first axis must be T, and `width` is O.
    """
    y = tl.load(y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    stride = tl.num_programs(0).to(tl.int64) * width
    for k in tl.static_range(1, num_sums):
        y += tl.load(y_ptr + k * stride + offsets, mask=inside, other=0.0).to(tl.float32)
    return y


def early_launch(early: bool) -> dict[str, Any]:
    """Returns the options of a launch that may begin before the kernel ahead of it in the stream has ended.

    Such a kernel must wait (gdc_wait) in every program before it reads or writes what another kernel touches. The wait
    is for the whole kernel ahead, which has waited in the same way, so everything before is complete too.
    """
    return {"launch_pdl": True} if early else {}
