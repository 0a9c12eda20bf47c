"""The activation between an expert's two linears, with the bias of the first one.

Experts without biases use the dense MLP's kernel where that has their activation. For the others, CUDA has one launch
of kernels/moe/expert_activation_triton.py.
"""

# N pairs · I intermediate size · E experts · U rows of gate_up: 2I, or I without a gate

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import Activation, gated_mul
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The product (up + 1) * gate * sigmoid(alpha * gate), after gate was clamped from above and up on both sides."""

    alpha: float = 1.702
    limit: float = 7.0


# silu and gelu_tanh multiply activation(gate) by up. relu2 is max(up, 0) squared, and such experts have no gate.
ExpertActivation = Activation | Literal["relu2"] | ClampedSwiGLU


def is_gated(activation: ExpertActivation) -> bool:
    return activation != "relu2"


def activate_experts(
    gate_up: LinearOutput,
    activation: ExpertActivation,
    expert_N: Tensor | None = None,
    bias_EU: Tensor | None = None,
) -> Tensor:
    """Returns the activation of every row of gate_up, [N, I] in its dtype. A row is gate, then up.

    If there is a bias, it is added first, and expert_N (int32) is the expert of each row.
    """
    if bias_EU is None and (activation == "silu" or activation == "gelu_tanh"):
        return gated_mul(gate_up, activation)
    if gate_up.affine_2T is not None:
        gate_up = LinearOutput(apply_affine(gate_up))
    if gate_up.y_TO.is_cuda:
        from lorafleet.kernels.moe.expert_activation_triton import activate_experts_triton  # optional on a CPU

        return activate_experts_triton(gate_up, activation, expert_N, bias_EU)
    return _activate_torch(gate_up, activation, expert_N, bias_EU)


def _activate_torch(
    gate_up: LinearOutput, activation: ExpertActivation, expert_N: Tensor | None, bias_EU: Tensor | None
) -> Tensor:
    y_NU = gate_up.added().float()
    if bias_EU is not None:
        assert expert_N is not None
        y_NU = y_NU + bias_EU[expert_N.long()].float()
    return _formula(y_NU, activation).to(gate_up.y_TO.dtype)


def _formula(y_NU: Tensor, activation: ExpertActivation) -> Tensor:
    if activation == "relu2":
        return F.relu(y_NU).square()
    gate, up = y_NU.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiGLU):
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
