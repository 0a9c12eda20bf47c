"""The gated delta rule in one launch, token by token. kernels/recurrent/delta_rule.py has its formulas and its twin.

Idea: a program has BLOCK_V columns of one head's memory for one sequence in registers. Columns do not depend on each
other. It reads them once, advances them by all tokens of the sequence in the step, and writes them back. This suits
decodes, which have one token, and the few tokens of short prompts. Sequences of more than FEW_TOKENS tokens are left to
kernels/recurrent/delta_chunks_triton.py.

Memory: rows of qkv are all queries, then all keys, then all values. The memories are float32 [S, H, K, V]. Neighboring
programs have the other columns of the same rows, so that memory is read in the order in which it lies.
"""

# T tokens of the step · B sequences · H value heads · G key heads · K numbers of a key · V numbers of a value
# C = 2 G K + H V channels · S state slots

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.recurrent.delta_chunks_triton import delta_chunks_triton
from lorafleet.kernels.recurrent.delta_rule import NORM_EPS, HeadGates
from lorafleet.kernels.recurrent.recurrent_batch import FEW_TOKENS, RecurrentBatch
from lorafleet.kernels.softplus_triton import softplus

BLOCK_V = 64


@jit()
def _advance(
    memory: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    forgetting: tl.tensor,
    dt_bias: tl.tensor,
    qkv_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_ptr: tl.tensor,
    out_ptr: tl.tensor,
    b_stride: tl.tensor,
    a_stride: tl.tensor,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    beta_scale: tl.constexpr,
    eps: tl.constexpr,
) -> tl.tensor:
    """Writes a token's result, and returns the memory after it."""
    keys: tl.constexpr = key_heads * k_dim
    in_k, in_v = k < k_dim, v < v_dim
    row = qkv_ptr + token * (2 * keys + heads * v_dim)
    key = (head // (heads // key_heads)) * k_dim + k
    q_K = tl.load(row + key, mask=in_k, other=0.0).to(tl.float32)
    k_K = tl.load(row + keys + key, mask=in_k, other=0.0).to(tl.float32)
    v_V = tl.load(row + 2 * keys + head * v_dim + v, mask=in_v, other=0.0).to(tl.float32)
    q_K *= tl.rsqrt(tl.sum(q_K * q_K, axis=0) + eps) * (k_dim**-0.5)
    k_K *= tl.rsqrt(tl.sum(k_K * k_K, axis=0) + eps)
    a = tl.load(a_ptr + token * a_stride + head).to(tl.float32) + dt_bias
    beta = tl.sigmoid(tl.load(b_ptr + token * b_stride + head).to(tl.float32)) * beta_scale
    memory *= tl.exp(-forgetting * softplus(a))
    correction_V = beta * (v_V - tl.sum(memory * k_K[:, None], axis=0))
    memory += k_K[:, None] * correction_V[None, :]
    out_V = tl.sum(memory * q_K[:, None], axis=0)
    tl.store(out_ptr + (token * heads + head) * v_dim + v, out_V.to(out_ptr.dtype.element_ty), mask=in_v)
    return memory


@jit(do_not_specialize=["slot_ptr", "new_ptr", "start_ptr", "kept_ptr"])
def _delta_rule_kernel(
    qkv_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    new_ptr: tl.tensor,
    start_ptr: tl.tensor,
    kept_ptr: tl.tensor,  # None if no states are kept
    out_ptr: tl.tensor,
    b_stride: tl.tensor,
    a_stride: tl.tensor,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    beta_scale: tl.constexpr,
    eps: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    most_tokens: tl.constexpr,
) -> None:
    head, sequence = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(start_ptr + sequence).to(tl.int64), tl.load(start_ptr + sequence + 1).to(tl.int64)
    if end - start > most_tokens or end == start:
        return
    k, v = tl.arange(0, block_k), tl.program_id(0) * block_v + tl.arange(0, block_v)
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    has_state = tl.load(new_ptr + sequence) == 0
    in_memory = (k < k_dim)[:, None] & (v < v_dim)[None, :]
    place = memory_ptr + ((slot * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
    memory = tl.load(place, mask=in_memory & has_state, other=0.0)
    forgetting = tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    if most_tokens > 1:
        for token in range(start, end):
            memory = _advance(
                memory, token, head, k, v, forgetting, dt_bias, qkv_ptr, b_ptr, a_ptr, out_ptr, b_stride, a_stride,
                heads, key_heads, k_dim, v_dim, beta_scale, eps,
            )  # fmt: skip
            if kept_ptr is not None:
                kept = tl.load(kept_ptr + token).to(tl.int64)
                behind = memory_ptr + ((kept * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
                tl.store(behind, memory, mask=in_memory & (kept >= 0))
    else:  # A loop of one token would take more registers.
        memory = _advance(
            memory, start, head, k, v, forgetting, dt_bias, qkv_ptr, b_ptr, a_ptr, out_ptr, b_stride, a_stride,
            heads, key_heads, k_dim, v_dim, beta_scale, eps,
        )  # fmt: skip
    tl.store(place, memory, mask=in_memory)


def delta_rule_triton(
    qkv_TC: Tensor, gates: HeadGates, memory_SHKV: Tensor, num_k_heads: int, batch: RecurrentBatch
) -> Tensor:
    _, heads, k_dim, v_dim = memory_SHKV.shape
    assert qkv_TC.is_contiguous() and qkv_TC.shape[1] == 2 * num_k_heads * k_dim + heads * v_dim
    assert memory_SHKV.is_contiguous() and memory_SHKV.dtype is torch.float32
    assert gates.b_TH.stride(1) == gates.a_TH.stride(1) == 1 and gates.a_log_H.dtype is torch.float32
    out_THV = torch.empty(len(qkv_TC), heads, v_dim, dtype=qkv_TC.dtype, device=qkv_TC.device)
    block_v = min(BLOCK_V, triton.next_power_of_2(v_dim))
    # Steps with prompts have one variant for all their sequences, so that warming up compiles it.
    is_decode = all(count == 1 for count in batch.query_lens)
    _delta_rule_kernel[triton.cdiv(v_dim, block_v), heads, len(batch.slot_B)](
        qkv_TC,
        *gates.tensors,
        memory_SHKV,
        batch.slot_B,
        batch.is_new_B,
        batch.start_B,
        batch.kept_T,
        out_THV,
        gates.b_TH.stride(0),
        gates.a_TH.stride(0),
        heads=heads,
        key_heads=num_k_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        beta_scale=gates.beta_scale,
        eps=NORM_EPS,
        block_k=triton.next_power_of_2(k_dim),
        block_v=block_v,
        most_tokens=1 if is_decode else FEW_TOKENS,
        num_warps=4,
    )
    if batch.long is not None:
        delta_chunks_triton(qkv_TC, gates, memory_SHKV, num_k_heads, batch, batch.long, out_THV)
    return out_THV
