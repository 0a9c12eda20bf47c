"""The gated activation between an MLP's two GEMMs. On CUDA it is one launch of kernels/decoder/gated_mul_triton.py."""

# T tokens · I intermediate size

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput

Activation = Literal["silu", "gelu_tanh"]


def gated_mul(gate_up: LinearOutput, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up [T, I] for the two halves of each row of gate_up.

    gelu_tanh is GELU in its approximation by tanh.
    """
    if gate_up.y_TO.is_cuda:
        from lorafleet.kernels.decoder.gated_mul_triton import gated_mul_triton  # triton is optional on a CPU

        return gated_mul_triton(gate_up, activation)
    gate, up = gate_up.added().chunk(2, dim=-1)
    return _activate(gate, activation).mul_(up).to(gate_up.y_TO.dtype)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
