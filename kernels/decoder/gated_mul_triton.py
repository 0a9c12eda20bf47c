"""The product activation(gate) * up in one launch, or activation(up). kernels/decoder/gated_mul.py has its twins.

Idea: elementwise. One program takes BLOCK_I columns of one token, reads them from both halves and rounds once.

Memory: gate_up and the adapters' delta are [T, 2I], where a row is gate, then up, or [T, I] without a gate. gate_up
may be in sums [K, T, 2I]. out is [T, I].
"""

# T tokens · I intermediate size · N numbers of the activation

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.decoder.gated_mul import Activation
from lorafleet.kernels.extras.affine_triton import scaled_and_shifted
from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.linear_tuning import may_start_early
from lorafleet.kernels.linear.split_sums_triton import early_launch, total
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.softplus_triton import softplus

BLOCK_I = 1024


# Rows of the table of addresses begin anywhere: their alignment must not cause another compilation.
@jit(do_not_specialize=["affine_ptr"])
def _gated_mul_kernel(
    gate_up_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.constexpr,
    has_delta: tl.constexpr,
    has_affine: tl.constexpr,
    activation: tl.constexpr,
    has_gate: tl.constexpr,
    num_sums: tl.constexpr,
    early: tl.constexpr,
    leads: tl.constexpr,
    block_i: tl.constexpr,
) -> None:
    width: tl.constexpr = 2 * size if has_gate else size
    if leads:
        gdc_launch_dependents()
    if early:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block_i + tl.arange(0, block_i)
    inside = i < size
    gate = total(gate_up_ptr, token * width + i, inside, width, num_sums)
    if has_delta:
        gate += tl.load(delta_ptr + token * width + i, mask=inside, other=0.0).to(tl.float32)
    if has_affine:
        gate = scaled_and_shifted(gate, affine_ptr, token, tl.num_programs(0), i, inside)
    if activation == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        out = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif activation == "gelu":
        out = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif activation == "relu2":
        out = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif activation == "xielu":
        alpha_p, alpha_n = softplus(tl.load(numbers_ptr)), softplus(tl.load(numbers_ptr + 1))
        beta, eps = tl.load(numbers_ptr + 2).to(tl.float32), tl.load(numbers_ptr + 3).to(tl.float32)
        negative = (tl.exp(tl.minimum(gate, eps)) - 1.0 - gate) * (beta + alpha_n)
        out = tl.where(gate > 0.0, alpha_p * gate * gate, negative) + beta * gate
    else:
        out = gate * tl.sigmoid(gate)
    if has_gate:
        up = total(gate_up_ptr, token * width + size + i, inside, width, num_sums)
        if has_delta:
            up += tl.load(delta_ptr + token * width + size + i, mask=inside, other=0.0).to(tl.float32)
        if has_affine:
            up = scaled_and_shifted(up, affine_ptr, token, tl.num_programs(0), size + i, inside)
        out *= up
    tl.store(out_ptr + token * size + i, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_mul_triton(
    gate_up: LinearOutput, activation: Activation = "silu", has_gate: bool = True, numbers_N: Tensor | None = None
) -> Tensor:
    x_TI, delta_TI, affine_2T, _ = gate_up
    gate_up.check(reads_sums=True)
    num_tokens, width = x_TI.shape
    size = width // 2 if has_gate else width
    assert not has_gate or width % 2 == 0
    out_TI = torch.empty(num_tokens, size, dtype=x_TI.dtype, device=x_TI.device)
    grid = (num_tokens, triton.cdiv(size, BLOCK_I))
    _gated_mul_kernel[grid](
        gate_up.read,
        delta_TI,
        affine_2T,
        numbers_N,
        out_TI,
        size=size,
        has_delta=delta_TI is not None,
        has_affine=affine_2T is not None,
        activation=activation,
        has_gate=has_gate,
        num_sums=gate_up.num_sums,
        early=gate_up.early,
        leads=may_start_early(x_TI.device),
        block_i=BLOCK_I,
        num_warps=4,
        **early_launch(gate_up.early),
    )
    return out_TI
