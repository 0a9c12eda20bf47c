"""A token's own scale and bias of a linear's output, for the kernels that read the output.

Idea: the addresses are loaded beside the output itself, and the vectors only if there are any. A token without them
costs two loads of 8 bytes per program, and nothing waits for these.
Memory: scale and bias are float32 and aligned to 16 bytes.
"""

# T tokens · O out

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput

BLOCK_O = 1024


@jit()
def own_vector(address: tl.tensor) -> tl.tensor:
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@jit()
def scaled_and_shifted(
    x: tl.tensor, affine_ptr: tl.tensor, token: tl.tensor, num_tokens: tl.tensor, columns: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """Returns scale * x + bias for the outputs `at`, in float32, or x itself if the token has neither."""
    scale = tl.load(affine_ptr + token)
    bias = tl.load(affine_ptr + num_tokens + token)
    x *= tl.load(own_vector(scale) + columns, mask=inside & (scale != 0), other=1.0)
    return x + tl.load(own_vector(bias) + columns, mask=inside & (bias != 0), other=0.0)


@jit(do_not_specialize=["affine_ptr"])
def _apply_affine_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    size: tl.constexpr,
    has_delta: tl.constexpr,
    block_o: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * block_o + tl.arange(0, block_o)
    inside = o < size
    offsets = token * size + o
    y = tl.load(y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if has_delta:
        y += tl.load(delta_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    y = scaled_and_shifted(y, affine_ptr, token, tl.num_programs(0), o, inside)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def apply_affine_triton(out: LinearOutput) -> Tensor:
    y_TO, delta_TO, affine_2T, _ = out
    out.check()
    num_tokens, size = y_TO.shape
    _apply_affine_kernel[(num_tokens, triton.cdiv(size, BLOCK_O))](
        y_TO, delta_TO, affine_2T, size=size, has_delta=delta_TO is not None, block_o=BLOCK_O, num_warps=4
    )
    return y_TO
