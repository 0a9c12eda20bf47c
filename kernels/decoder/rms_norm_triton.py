"""RMS norm and add + RMS norm in one pass over memory. kernels/decoder/rms_norm.py has its twin.

Idea: one program holds one token's whole row in registers. It reads the row once, or the sums of which it consists,
adds the adapters' delta and the residual, sums the squares in fp32, scales, and stores. If the branch has its own norm
before the residual is added, that is done in the same pass. A layer norm subtracts the row's mean first. A row's bits
do not depend on the batch.

Memory: x, delta, residual and out are [T, D], row-major. x may be in sums [K, T, D]. The sum with the residual
overwrites the residual. D need not be a power of two: the row is padded in registers. own is int64 [T]: the addresses
of the tokens' own weights, which are float32. 0 selects the norm's weight. A bias is [D].
"""

# T tokens · D hidden size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.extras.affine_triton import own_vector, scaled_and_shifted
from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.linear_tuning import may_start_early
from lorafleet.kernels.linear.split_sums_triton import early_launch, total
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
    branch_bias_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    own_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    size: tl.constexpr,
    has_delta: tl.constexpr,
    has_affine: tl.constexpr,
    has_branch_norm: tl.constexpr,
    has_residual: tl.constexpr,
    has_norm: tl.constexpr,
    has_own: tl.constexpr,
    has_bias: tl.constexpr,
    is_centered: tl.constexpr,
    is_scaled: tl.constexpr,
    num_sums: tl.constexpr,
    early: tl.constexpr,
    leads: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    if leads:
        gdc_launch_dependents()
    if early:
        gdc_wait()
    d = tl.arange(0, block_d)
    inside = d < size
    token = tl.program_id(0).to(tl.int64)
    offsets = token * size + d
    x = total(x_ptr, offsets, inside, size, num_sums)
    if has_delta:
        x += tl.load(delta_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if has_affine:
        x = scaled_and_shifted(x, affine_ptr, token, tl.num_programs(0), d, inside)
    if has_branch_norm:
        branch_weight = norm_weight(branch_weight_ptr, branch_own_ptr, token, d, inside, has_own)
        x = x.to(out_ptr.dtype.element_ty)
        if is_centered:
            x = centered(x, inside, size)
        x = normed(x, branch_weight, eps, size)
        if has_bias:
            x += tl.load(branch_bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    if is_scaled:
        x *= scale
    if has_residual:
        rounded = (x + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)).to(
            out_ptr.dtype.element_ty
        )
        tl.store(residual_ptr + offsets, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if has_norm:
        weight = norm_weight(weight_ptr, own_ptr, token, d, inside, has_own)
        if is_centered:
            x = centered(x, inside, size)
        x = normed(x, weight, eps, size)
        if has_bias:
            x += tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


@jit()
def centered(x: tl.tensor, inside: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Returns the row minus its mean in fp32, padded with zeros as before."""
    x = x.to(tl.float32)
    return tl.where(inside, x - tl.sum(x, 0) / size, 0.0)


@jit()
def normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Returns the norm in fp32 of a row that is padded with zeros."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight.to(tl.float32)


def rms_norm_triton(
    x: LinearOutput,
    residual_TD: Tensor | None,
    norm: NormWeight | None,
    eps: float,
    branch: NormWeight | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Returns the norm of x or, with a residual, the norm of scale * x + residual, which then replaces the residual.

    Without a norm it returns the residual. `branch` is as in add_rms_norm. Both norms are of one kind.
    """
    x_TD, delta_TD, affine_2T, _ = x
    x.check(reads_sums=True)
    size = x_TD.shape[-1]
    either = norm or branch or NormWeight(x_TD)
    own_weight = norm or NormWeight(x_TD)
    own_branch = branch or NormWeight(x_TD)
    assert norm is not None or residual_TD is not None
    assert norm is None or norm.weight.shape == (size,)
    assert branch is None or (branch.weight.shape == (size,) and residual_TD is not None)
    if norm is not None and branch is not None:
        assert (branch.own_T is None) == (norm.own_T is None)
        assert branch.is_centered == norm.is_centered
        assert (branch.bias_D is None) == (norm.bias_D is None)
    if residual_TD is not None:
        assert residual_TD.shape == x_TD.shape and residual_TD.dtype == x_TD.dtype
        assert residual_TD.is_contiguous()
    out_TD = torch.empty_like(x_TD) if norm is not None else residual_TD
    assert out_TD is not None
    block_d = triton.next_power_of_2(size)
    _rms_norm_kernel[(x_TD.numel() // size,)](
        x.read,
        delta_TD,
        affine_2T,
        residual_TD,
        own_branch.weight,
        own_branch.own_T,
        own_branch.bias_D,
        own_weight.weight,
        own_weight.own_T,
        own_weight.bias_D,
        out_TD,
        eps,
        scale,
        size=size,
        has_delta=delta_TD is not None,
        has_affine=affine_2T is not None,
        has_branch_norm=branch is not None,
        has_residual=residual_TD is not None,
        has_norm=norm is not None,
        has_own=either.own_T is not None,
        has_bias=either.bias_D is not None,
        is_centered=either.is_centered,
        is_scaled=scale != 1.0,
        num_sums=x.num_sums,
        early=x.early,
        leads=may_start_early(x_TD.device),
        block_d=block_d,
        num_warps=min(MOST_WARPS, max(1, block_d // (32 * ELEMENTS_A_THREAD))),
        **early_launch(x.early),
    )
    return out_TD
