"""The product activation(gate) * up in one launch. kernels/decoder/gated_mul.py has its twin.

Idea: elementwise. One program takes BLOCK_I columns of one token, reads them from both halves and rounds once.

Memory: gate_up and the adapters' delta are [T, 2I], where a row is gate, then up. out is [T, I].
"""

# T tokens · I intermediate size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import Activation
from lorafleet.kernels.extras.affine_triton import scaled_and_shifted
from lorafleet.kernels.jit import jit
from lorafleet.kernels.lora.linear_output import LinearOutput

BLOCK_I = 1024


# Rows of the table of addresses begin anywhere: their alignment must not cause another compilation.
@jit(do_not_specialize=["affine_ptr"])
def _gated_mul_kernel(
    gate_up_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.constexpr,
    has_delta: tl.constexpr,
    has_affine: tl.constexpr,
    is_gelu: tl.constexpr,
    block_i: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * block_i + tl.arange(0, block_i)
    inside = i < size
    gate = tl.load(gate_up_ptr + token * (2 * size) + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * size) + size + i, mask=inside, other=0.0).to(tl.float32)
    if has_delta:
        gate += tl.load(delta_ptr + token * (2 * size) + i, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(delta_ptr + token * (2 * size) + size + i, mask=inside, other=0.0).to(tl.float32)
    if has_affine:
        gate = scaled_and_shifted(gate, affine_ptr, token, tl.num_programs(0), i, inside)
        up = scaled_and_shifted(up, affine_ptr, token, tl.num_programs(0), size + i, inside)
    if is_gelu:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        out = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * size + i, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_mul_triton(gate_up: LinearOutput, activation: Activation = "silu") -> Tensor:
    gate_up_T2I, delta_T2I, affine_2T = gate_up
    gate_up.check()
    num_tokens, width = gate_up_T2I.shape
    assert width % 2 == 0
    out_TI = torch.empty(num_tokens, width // 2, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    grid = (num_tokens, triton.cdiv(width // 2, BLOCK_I))
    _gated_mul_kernel[grid](
        gate_up_T2I,
        delta_T2I,
        affine_2T,
        out_TI,
        size=width // 2,
        has_delta=delta_T2I is not None,
        has_affine=affine_2T is not None,
        is_gelu=activation == "gelu_tanh",
        block_i=BLOCK_I,
        num_warps=4,
    )
    return out_TI
