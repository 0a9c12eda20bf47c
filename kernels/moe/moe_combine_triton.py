"""The weighted sum of the chosen experts' outputs on the GPU in one launch, with the experts' biases and the shared
expert's output. kernels/moe/moe_torch.py has its twin.

Idea: elementwise. The sum adds a token's pairs in their order in float32 and rounds once. It needs no atomics, and
every run gives the same bits. The adapters' additions, if there are any, are read for the tokens whose adapter has some
(kernels/moe/expert_lora_triton.py).
"""

# T tokens · E experts · K experts a token · N = T * K pairs · D hidden size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.moe.expert_lora import StepExperts
from lorafleet.kernels.moe.expert_lora_triton import record_of
from lorafleet.kernels.moe.moe_torch import SharedOutput

BLOCK_D = 512


@jit()
def with_shared(
    acc: tl.tensor,
    shared_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    token: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    size: tl.constexpr,
    has_shared: tl.constexpr,
    has_gate: tl.constexpr,
) -> tl.tensor:
    """Returns acc plus the columns d of the shared expert's output."""
    if has_shared:
        shared = tl.load(shared_ptr + token * size + d, mask=inside, other=0.0).to(tl.float32)
        if has_gate:
            shared *= tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32))
        acc += shared
    return acc


@jit(do_not_specialize=["slot_ptr", "record_ptr"])
def _combine_kernel(
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    record_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.constexpr,
    per_token: tl.constexpr,
    has_delta: tl.constexpr,
    has_weight: tl.constexpr,
    has_bias: tl.constexpr,
    has_shared: tl.constexpr,
    has_gate: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block_d + tl.arange(0, block_d)
    inside = d < size
    acc = tl.zeros((block_d,), tl.float32)
    has_own = False
    if has_delta:
        has_own = record_of(slot_ptr, token, record_ptr) != 0
    for i in tl.static_range(per_token):
        pair = token * per_token + i
        y = tl.load(y_ptr + pair * size + d, mask=inside, other=0.0).to(tl.float32)
        if has_delta:
            y += tl.load(delta_ptr + pair * size + d, mask=inside & has_own, other=0.0).to(tl.float32)
        if has_bias:
            expert = tl.load(expert_ptr + pair).to(tl.int64)
            y += tl.load(bias_ptr + expert * size + d, mask=inside, other=0.0).to(tl.float32)
        if has_weight:
            acc += tl.load(weight_ptr + pair) * y
        else:
            acc += y
    acc = with_shared(acc, shared_ptr, gate_ptr, token, d, inside, size, has_shared, has_gate)
    tl.store(out_ptr + token * size + d, acc.to(out_ptr.dtype.element_ty), mask=inside)


def check_summands(
    y_ND: Tensor, expert_TK: Tensor, bias_ED: Tensor | None, shared: SharedOutput | None
) -> tuple[Tensor | None, Tensor | None]:
    """Checks the inputs of a weighted sum. Returns the shared expert's output and gate, or None for what is missing."""
    (num_tokens, per_token), (num_pairs, size) = expert_TK.shape, y_ND.shape
    assert y_ND.is_contiguous() and num_pairs == num_tokens * per_token
    assert bias_ED is None or (bias_ED.is_contiguous() and bias_ED.shape[1] == size)
    shared_TD, gate_T1 = (None, None) if shared is None else shared
    assert shared_TD is None or (shared_TD.is_contiguous() and shared_TD.shape == (num_tokens, size))
    assert gate_T1 is None or (gate_T1.is_contiguous() and gate_T1.shape == (num_tokens, 1))
    return shared_TD, gate_T1


def combine_triton(
    y_ND: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor | None,
    bias_ED: Tensor | None = None,
    shared: SharedOutput | None = None,
    delta_ND: Tensor | None = None,
    adapters: StepExperts | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's pairs, [T, D] in y's dtype.

    delta is expand_experts() with these adapters. It is None if no token has an adapter on the experts.
    """
    shared_TD, gate_T1 = check_summands(y_ND, expert_TK, bias_ED, shared)
    (num_tokens, per_token), size = expert_TK.shape, y_ND.shape[1]
    assert delta_ND is None or (delta_ND.shape == y_ND.shape and delta_ND.is_contiguous() and adapters is not None)
    out_TD = torch.empty(num_tokens, size, dtype=y_ND.dtype, device=y_ND.device)
    _combine_kernel[(num_tokens, triton.cdiv(size, BLOCK_D))](
        y_ND,
        delta_ND,
        expert_TK,
        weight_TK,
        bias_ED,
        shared_TD,
        gate_T1,
        None if adapters is None else adapters.slot_T,
        None if adapters is None else adapters.record_S,
        out_TD,
        size=size,
        per_token=per_token,
        has_delta=delta_ND is not None,
        has_weight=weight_TK is not None,
        has_bias=bias_ED is not None,
        has_shared=shared is not None,
        has_gate=gate_T1 is not None,
        block_d=BLOCK_D,
        num_warps=4,
    )
    return out_TD
