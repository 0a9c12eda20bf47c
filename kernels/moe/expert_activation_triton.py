"""The activation of all pairs of a step in one launch, with their experts' biases.
kernels/moe/expert_activation.py has its twin.

Idea: elementwise. One program takes BLOCK_I columns of one pair, reads them from gate and up, adds the adapters' delta
and the bias of the pair's expert, and rounds once.

Memory: gate_up and delta are [N, U], where a row is gate, then up, or up alone. The bias is [E, U], out is [N, I].
"""

# N pairs · I intermediate size · E experts · U rows of gate_up: 2I, or I without a gate

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.expert_activation import ClampedSwiGLU, ExpertActivation, is_gated

BLOCK_I = 1024


@jit()
def activation_of(
    first: tl.tensor, up: tl.tensor, alpha: tl.constexpr, limit: tl.constexpr, formula: tl.constexpr
) -> tl.tensor:
    """Returns the activation of gate and up. A formula without a gate has its input first, and ignores up."""
    if formula == "relu2":
        positive = tl.maximum(first, 0.0)
        out = positive * positive
    elif formula == "clamped_swiglu":
        gate = tl.minimum(first, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    elif formula == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        out = first * tl.sigmoid(1.5957691216057308 * (first + 0.044715 * first * first * first)) * up
    else:
        out = first * tl.sigmoid(first) * up
    return out


@jit()
def _column(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    offset: tl.tensor,
    bias_offset: tl.tensor,
    inside: tl.tensor,
    has_delta: tl.constexpr,
    has_bias: tl.constexpr,
) -> tl.tensor:
    y = tl.load(y_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if has_delta:
        y += tl.load(delta_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if has_bias:
        y += tl.load(bias_ptr + bias_offset, mask=inside, other=0.0).to(tl.float32)
    return y


@jit()
def _activation_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    out_ptr: tl.tensor,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    has_delta: tl.constexpr,
    has_bias: tl.constexpr,
    formula: tl.constexpr,
    block_i: tl.constexpr,
) -> None:
    pair = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block_i + tl.arange(0, block_i)
    inside = i < size
    offset = pair * width + i
    bias_offset = i
    if has_bias:
        bias_offset += tl.load(expert_ptr + pair).to(tl.int64) * width
    first = _column(y_ptr, delta_ptr, bias_ptr, offset, bias_offset, inside, has_delta, has_bias)
    up = first
    if formula != "relu2":
        up = _column(y_ptr, delta_ptr, bias_ptr, offset + size, bias_offset + size, inside, has_delta, has_bias)
    out = activation_of(first, up, alpha, limit, formula)
    tl.store(out_ptr + pair * size + i, out.to(out_ptr.dtype.element_ty), mask=inside)


def formula_of(activation: ExpertActivation) -> dict[str, str | float]:
    """Returns the constants of activation_of."""
    if isinstance(activation, ClampedSwiGLU):
        return {"formula": "clamped_swiglu", "alpha": activation.alpha, "limit": activation.limit}
    return {"formula": activation, "alpha": 0.0, "limit": 0.0}


def activate_experts_triton(
    gate_up: LinearOutput, activation: ExpertActivation, expert_N: Tensor | None, bias_EU: Tensor | None
) -> Tensor:
    gate_up.check()
    y_NU, delta_NU, affine, _ = gate_up
    num_pairs, width = y_NU.shape
    size = width // 2 if is_gated(activation) else width
    assert affine is None
    if bias_EU is not None:
        assert expert_N is not None and expert_N.is_contiguous() and len(expert_N) == num_pairs
        assert bias_EU.is_contiguous() and bias_EU.shape[1] == width
    out_NI = torch.empty(num_pairs, size, dtype=y_NU.dtype, device=y_NU.device)
    _activation_kernel[(num_pairs, triton.cdiv(size, BLOCK_I))](
        y_NU,
        delta_NU,
        bias_EU,
        expert_N,
        out_NI,
        **formula_of(activation),
        size=size,
        width=width,
        has_delta=delta_NU is not None,
        has_bias=bias_EU is not None,
        block_i=BLOCK_I,
        num_warps=4,
    )
    return out_NI
