"""RMS norm, alone or with the residual's add before it. On CUDA either is one launch of
kernels/decoder/rms_norm_triton.py.

Source: arXiv 1910.07467.
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


def rms_norm(x: Tensor, norm: NormWeight, eps: float) -> Tensor:
    """Returns the norm of x. x is [T, D], or on a CPU [T, H, D] too."""
    if x.is_cuda:
        from lorafleet.kernels.decoder.rms_norm_triton import rms_norm_triton  # triton is optional on a CPU

        return rms_norm_triton(LinearOutput(x), None, norm, eps)
    weight = norm.weight
    if weight.dim() > 1:
        by_token = weight if x.dim() == 2 else weight.unsqueeze(1)
        return (F.rms_norm(x.float(), weight.shape[1:], None, eps) * by_token).to(x.dtype)
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: LinearOutput, residual_TD: Tensor, norm: NormWeight, eps: float, branch: NormWeight | None = None
) -> Tensor:
    """Adds x to the residual in place, and returns the norm of the sum, as rounded to the residual's dtype.

    `branch` is a norm that is applied to x before it is added, as Gemma does.
    """
    if x.y_TO.is_cuda:
        from lorafleet.kernels.decoder.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, residual_TD, norm, eps, branch)
    added_TD = x.added()  # rounded once, with the residual
    if branch is not None:
        added_TD = rms_norm(added_TD.to(x.y_TO.dtype), branch, eps)
    return rms_norm(residual_TD.add_(added_TD), norm, eps)
