"""RMS norm, alone or with the residual's add before it. On CUDA either is one launch of kernels/rms_norm_triton.py.

Source: arXiv 1910.07467.
"""

# T tokens · D hidden size

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight may be float32 where x is not: then nothing is rounded before it is multiplied."""
    if x_TD.is_cuda:
        from lorafleet.kernels.rms_norm_triton import rms_norm_triton  # triton is optional on a CPU

        return rms_norm_triton(x_TD, None, None, weight_D, eps)
    if weight_D.dtype != x_TD.dtype:
        return F.rms_norm(x_TD.float(), weight_D.shape, weight_D, eps).to(x_TD.dtype)
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def add_rms_norm(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    residual_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    branch_weight_D: Tensor | None = None,
) -> Tensor:
    """residual += x + delta, in place; returns the norm of that sum, as rounded to the residual's dtype.

    delta: what adapters add to x (kernels/lora.py), or None. branch_weight: x + delta is normed by it before it is
    added, as Gemma does.
    """
    if x_TD.is_cuda:
        from lorafleet.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x_TD, delta_TD, residual_TD, weight_D, eps, branch_weight_D)
    added_TD = x_TD if delta_TD is None else x_TD.float() + delta_TD.float()  # rounded once, with the residual
    if branch_weight_D is not None:
        added_TD = rms_norm(added_TD.to(x_TD.dtype), branch_weight_D, eps)
    return rms_norm(residual_TD.add_(added_TD), weight_D, eps)
