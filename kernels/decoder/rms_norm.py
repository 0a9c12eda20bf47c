"""RMS norm, alone or with the residual's add before it. On CUDA either is one launch of
kernels/decoder/rms_norm_triton.py. A norm may subtract the mean first, which makes it a layer norm.

Sources: arXiv 1910.07467 (RMS norm), arXiv 1607.06450 (layer norm).
"""

# T tokens · H heads · D size of the norm

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput


class NormWeight(NamedTuple):
    """The weight of a norm, and those of the tokens' adapters (kernels/lora/norm_slots.py)."""

    # [D]; on a CPU [T, D] if adapters have weights of their own. If it is float32 and x is not, nothing is rounded
    # before the multiplication.
    weight: Tensor
    own_T: Tensor | None = None  # on CUDA, the addresses of the tokens' own weights
    is_centered: bool = False  # the mean is subtracted first: a layer norm
    bias_D: Tensor | None = None  # added at the end


def rms_norm(x: Tensor, norm: NormWeight, eps: float) -> Tensor:
    """Returns the norm of x. x is [T, D], or on a CPU [T, H, D] too."""
    if x.is_cuda:
        from lorafleet.kernels.decoder.rms_norm_triton import rms_norm_triton  # triton is optional on a CPU

        return rms_norm_triton(LinearOutput(x), None, norm, eps)
    weight = norm.weight
    if norm.is_centered or norm.bias_D is not None or weight.dim() > 1:
        by_token = weight.unsqueeze(1) if weight.dim() > 1 and x.dim() > 2 else weight
        x_float = x.float()
        if norm.is_centered:
            x_float = x_float - x_float.mean(-1, keepdim=True)
        normed = F.rms_norm(x_float, weight.shape[-1:], None, eps) * by_token
        return (normed if norm.bias_D is None else normed + norm.bias_D).to(x.dtype)
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: LinearOutput,
    residual_TD: Tensor,
    norm: NormWeight | None,
    eps: float,
    branch: NormWeight | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Adds scale * x to the residual in place, and returns the norm of the sum, as rounded to the residual's dtype.

    Without a norm, it returns the residual itself. `branch` is a norm that is applied to x before it is scaled and
    added, as Gemma does.
    """
    if x.y_TO.is_cuda:
        from lorafleet.kernels.decoder.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, residual_TD, norm, eps, branch, scale)
    added_TD = x.added()  # rounded once, with the residual
    if branch is not None:
        added_TD = rms_norm(added_TD.to(x.y_TO.dtype), branch, eps)
    if scale != 1.0:
        added_TD = added_TD * scale
    residual_TD.add_(added_TD)
    return residual_TD if norm is None else rms_norm(residual_TD, norm, eps)
