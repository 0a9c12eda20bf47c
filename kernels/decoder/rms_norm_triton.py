"""RMS norm and add + RMS norm in one pass over memory. kernels/decoder/rms_norm.py has its twin.

Idea: one program holds one token's whole row in registers. It reads the row once, adds the adapters' delta and the
residual, sums the squares in fp32, scales, and stores. If the branch has its own norm before the residual is added,
that is done in the same pass. A row's bits do not depend on the batch.

Memory: x, delta, residual and out are [T, D], row-major. The sum overwrites the residual. D need not be a power of
two: the row is padded in registers. own is int64 [T]: the addresses of the tokens' own weights, which are float32. 0
selects the norm's weight.
"""

# T tokens · D hidden size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.extras.affine_triton import own_vector, scaled_and_shifted
from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput

ELEMENTS_A_THREAD = 16  # elements of a row; two 16-byte loads in half precision
MOST_WARPS = 16


@jit()
def norm_weight(
    weight_ptr: tl.tensor,
    own_ptr: tl.tensor,
    token: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    has_own: tl.constexpr,
) -> tl.tensor:
    """Returns the token's weight in fp32."""
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if has_own:
        own = tl.load(own_ptr + token)
        weight = tl.where(own == 0, weight, tl.load(own_vector(own) + columns, mask=inside & (own != 0), other=0.0))
    return weight


# Rows of the table of addresses begin anywhere: their alignment must not cause another compilation.
@jit(do_not_specialize=["affine_ptr", "branch_own_ptr", "own_ptr"])
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    branch_weight_ptr: tl.tensor,
    branch_own_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    own_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    has_delta: tl.constexpr,
    has_affine: tl.constexpr,
    has_branch_norm: tl.constexpr,
    has_residual: tl.constexpr,
    has_own: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    d = tl.arange(0, block_d)
    inside = d < size
    token = tl.program_id(0).to(tl.int64)
    offsets = token * size + d
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    weight = norm_weight(weight_ptr, own_ptr, token, d, inside, has_own)
    if has_delta:
        x += tl.load(delta_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if has_affine:
        x = scaled_and_shifted(x, affine_ptr, token, tl.num_programs(0), d, inside)
    if has_branch_norm:
        branch_weight = norm_weight(branch_weight_ptr, branch_own_ptr, token, d, inside, has_own)
        x = normed(x.to(out_ptr.dtype.element_ty), branch_weight, eps, size)
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    if has_residual:
        rounded = (x + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)).to(
            out_ptr.dtype.element_ty
        )
        tl.store(residual_ptr + offsets, rounded, mask=inside)
        x = rounded.to(tl.float32)
    tl.store(out_ptr + offsets, normed(x, weight, eps, size).to(out_ptr.dtype.element_ty), mask=inside)


@jit()
def normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Returns the norm in fp32 of a row that is padded with zeros."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight.to(tl.float32)


def rms_norm_triton(
    x: LinearOutput, residual_TD: Tensor | None, norm: NormWeight, eps: float, branch: NormWeight | None = None
) -> Tensor:
    """Returns the norm of x or, with a residual, the norm of x + residual, which then replaces the residual.

    `branch` is as in add_rms_norm.
    """
    x_TD, delta_TD, affine_2T = x
    x.check()
    size = x_TD.shape[-1]
    assert norm.weight.shape == (size,)
    branch_weight_D, branch_own_T = branch or (None, None)
    assert branch_weight_D is None or (branch_weight_D.shape == (size,) and residual_TD is not None)
    assert branch is None or (branch_own_T is None) == (norm.own_T is None)
    if residual_TD is not None:
        assert residual_TD.shape == x_TD.shape and residual_TD.dtype == x_TD.dtype
        assert residual_TD.is_contiguous()
    out_TD = torch.empty_like(x_TD)
    block_d = triton.next_power_of_2(size)
    _rms_norm_kernel[(x_TD.numel() // size,)](
        x_TD,
        delta_TD,
        affine_2T,
        residual_TD,
        branch_weight_D,
        branch_own_T,
        norm.weight,
        norm.own_T,
        out_TD,
        eps,
        size=size,
        has_delta=delta_TD is not None,
        has_affine=affine_2T is not None,
        has_branch_norm=branch_weight_D is not None,
        has_residual=residual_TD is not None,
        has_own=norm.own_T is not None,
        block_d=block_d,
        num_warps=min(MOST_WARPS, max(1, block_d // (32 * ELEMENTS_A_THREAD))),
    )
    return out_TD
