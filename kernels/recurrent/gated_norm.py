"""The norm of each head of a recurrent layer's result, multiplied by SiLU of a gate behind the norm or before it.

A head here is whatever is normed together. In Mamba-2 it is a group of heads.

On CUDA it is kernels/recurrent/gated_norm_triton.py.
"""

# T tokens · H heads · V numbers of a head

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(x_THV: Tensor, gate_THV: Tensor, weight_HV: Tensor, eps: float, gates_first: bool = False) -> Tensor:
    """Returns rms_norm(x) * weight * silu(gate) [T, H, V] in x's dtype, or rms_norm(x * silu(gate)) * weight.

    x is contiguous. The gate's tokens may be apart, but its heads are side by side. The weight is [V] if all heads have
    the same.
    """
    if x_THV.is_cuda:
        from lorafleet.kernels.recurrent.gated_norm_triton import gated_norm_triton  # triton is optional on a CPU

        return gated_norm_triton(x_THV, gate_THV, weight_HV, eps, gates_first)
    return gated_norm_torch(x_THV, gate_THV, weight_HV, eps, gates_first)


def gated_norm_torch(
    x_THV: Tensor, gate_THV: Tensor, weight_HV: Tensor, eps: float, gates_first: bool = False
) -> Tensor:
    x32_THV, gate_THV = x_THV.float(), F.silu(gate_THV.float())
    if gates_first:
        x32_THV = x32_THV * gate_THV
    normed_THV = x32_THV * torch.rsqrt(x32_THV.square().mean(dim=-1, keepdim=True) + eps) * weight_HV.float()
    return (normed_THV if gates_first else normed_THV * gate_THV).to(x_THV.dtype)
