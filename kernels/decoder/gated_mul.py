"""The activation between an MLP's two GEMMs, with a gate or without. On CUDA it is one launch of
kernels/decoder/gated_mul_triton.py."""

# T tokens · I intermediate size · N numbers of the activation

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput

# gelu_tanh is GELU in its approximation by tanh. relu2 is the square of ReLU (Primer, arXiv 2109.08668). xielu has four
# learned numbers in each layer, alpha_p, alpha_n, beta and eps (arXiv 2411.13010), and no gate.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]


def gated_mul(gate_up: LinearOutput, activation: Activation = "silu") -> Tensor:
    """Returns activation(gate) * up [T, I] for the two halves of each row of gate_up."""
    if gate_up.y_TO.is_cuda:
        from lorafleet.kernels.decoder.gated_mul_triton import gated_mul_triton  # triton is optional on a CPU

        return gated_mul_triton(gate_up, activation)
    gate, up = gate_up.added().chunk(2, dim=-1)
    return _activate(gate, activation).mul_(up).to(gate_up.y_TO.dtype)


def activated(x: LinearOutput, activation: Activation, numbers_N: Tensor | None = None) -> Tensor:
    """Returns activation(x) [T, I], for an MLP without a gate. numbers_N is [4] for xielu, else None."""
    assert (numbers_N is None) == (activation != "xielu")
    if x.y_TO.is_cuda:
        from lorafleet.kernels.decoder.gated_mul_triton import gated_mul_triton

        return gated_mul_triton(x, activation, has_gate=False, numbers_N=numbers_N)
    if numbers_N is not None:
        return _xielu(x.added(), numbers_N).to(x.y_TO.dtype)
    return _activate(x.added(), activation).to(x.y_TO.dtype)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return F.silu(gate)
        case "gelu":
            return F.gelu(gate)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh")
        case "relu2":
            return F.relu(gate).square()
        case "xielu":
            raise AssertionError("xielu has numbers and no gate")


def _xielu(x_TI: Tensor, numbers_N: Tensor) -> Tensor:
    alpha_p, alpha_n, beta, eps = numbers_N.float()
    negative_TI = (torch.expm1(torch.minimum(x_TI, eps)) - x_TI) * (beta + F.softplus(alpha_n))
    out_TI: Tensor = torch.where(x_TI > 0, F.softplus(alpha_p) * x_TI * x_TI, negative_TI) + beta * x_TI
    return out_TI
