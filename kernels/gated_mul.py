"""The gated activation between an MLP's two GEMMs. On CUDA one launch of kernels/gated_mul_triton.py."""

# T tokens · I intermediate size

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


def gated_mul(gate_up_T2I: Tensor, delta_T2I: Tensor | None, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up [T, I], of the two halves of each row of gate_up + delta.

    delta: what adapters add to gate_up (kernels/lora.py), or None. gelu_tanh: GELU by its approximation with tanh.
    """
    if gate_up_T2I.is_cuda:
        from lorafleet.kernels.gated_mul_triton import gated_mul_triton  # triton is optional on a CPU

        return gated_mul_triton(gate_up_T2I, delta_T2I, activation)
    if delta_T2I is not None:
        gate, up = (gate_up_T2I.float() + delta_T2I.float()).chunk(2, dim=-1)
        return _activate(gate, activation).mul_(up).to(gate_up_T2I.dtype)
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return _activate(gate, activation).mul_(up)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
