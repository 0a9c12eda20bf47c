"""The gated activation between an MLP's two GEMMs. On CUDA one launch of kernels/silu_mul_triton.py."""

# T tokens · I intermediate size

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_T2I: Tensor, delta_T2I: Tensor | None) -> Tensor:
    """silu(gate) * up [T, I], of the two halves of each row of gate_up + delta.

    delta: what adapters add to gate_up (kernels/lora.py), or None.
    """
    if gate_up_T2I.is_cuda:
        from lorafleet.kernels.silu_mul_triton import silu_mul_triton  # triton is optional on a CPU

        return silu_mul_triton(gate_up_T2I, delta_T2I)
    if delta_T2I is not None:
        gate, up = (gate_up_T2I.float() + delta_T2I.float()).chunk(2, dim=-1)
        return F.silu(gate).mul_(up).to(gate_up_T2I.dtype)
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
