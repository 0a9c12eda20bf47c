"""The state space of Mamba-2 in one launch for decodes and one for prompts. kernels/recurrent/state_space.py has its
formulas and its twin.

Idea: a program has BLOCK_V columns of one head's memory for one sequence in registers. Columns do not depend on each
other. For a sequence with one token, it decays them, adds the token, and writes them back. For a sequence with more, it
takes CHUNK tokens after another: their results are two matrix products, one with each other and one with the memory
before them, and a third product advances the memory. Each kernel leaves the other's sequences alone. In float32, which
tensor cores do not have, the kernel for one token walks through all tokens. Where states behind tokens are kept, it
walks through the few tokens of a sequence, and writes the memory behind each.

Memory: rows of xkq are x of all heads, then k and then q of all groups. The memories are float32 [S, H, K, V].
Neighboring programs have the other columns of the same rows, so that memory is read in the order in which it lies.
"""

# T tokens of the step · B sequences · H heads · G groups · K numbers of a key · V numbers of a head
# C = H V + 2 G K channels · S state slots · N tokens of a chunk

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.recurrent.recurrent_batch import CHUNK, FEW_TOKENS, RecurrentBatch
from lorafleet.kernels.recurrent.state_space import HeadSteps
from lorafleet.kernels.softplus_triton import softplus

BLOCK_V = 64
ANY_NUMBER = 1 << 30  # More tokens than any sequence has in a step.
LARGE_K = 128  # Keys with more numbers get half the columns, since registers hold both dimensions.


@jit()
def _advance(
    memory: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    forgetting: tl.tensor,
    dt_bias: tl.tensor,
    passed: tl.tensor,
    xkq_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dt_stride: tl.tensor,
    heads: tl.constexpr,
    groups: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    dt_min: tl.constexpr,
    dt_max: tl.constexpr,
) -> tl.tensor:
    """Writes a token's result, and returns the memory after it."""
    in_k, in_v = k < k_dim, v < v_dim
    row = xkq_ptr + token * (heads * v_dim + 2 * groups * k_dim)
    key = row + heads * v_dim + (head // (heads // groups)) * k_dim + k
    x_V = tl.load(row + head * v_dim + v, mask=in_v, other=0.0).to(tl.float32)
    k_K = tl.load(key, mask=in_k, other=0.0).to(tl.float32)
    q_K = tl.load(key + groups * k_dim, mask=in_k, other=0.0).to(tl.float32)
    dt = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + dt_bias)
    dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    memory = memory * tl.exp(-forgetting * dt) + k_K[:, None] * (dt * x_V)[None, :]
    out_V = tl.sum(memory * q_K[:, None], axis=0) + passed * x_V
    tl.store(out_ptr + (token * heads + head) * v_dim + v, out_V.to(out_ptr.dtype.element_ty), mask=in_v)
    return memory


@jit(do_not_specialize=["slot_ptr", "new_ptr", "start_ptr", "kept_ptr"])
def _step_kernel(
    xkq_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    d_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    new_ptr: tl.tensor,
    start_ptr: tl.tensor,
    kept_ptr: tl.tensor,  # None if no states are kept
    out_ptr: tl.tensor,
    dt_stride: tl.tensor,
    heads: tl.constexpr,
    groups: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    dt_min: tl.constexpr,
    dt_max: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    most_tokens: tl.constexpr,
) -> None:
    head, sequence = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(start_ptr + sequence).to(tl.int64), tl.load(start_ptr + sequence + 1).to(tl.int64)
    if end - start > most_tokens or end == start:
        return
    k, v = tl.arange(0, block_k), tl.program_id(0) * block_v + tl.arange(0, block_v)
    in_k, in_v = k < k_dim, v < v_dim
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    has_state = tl.load(new_ptr + sequence) == 0
    in_memory = in_k[:, None] & in_v[None, :]
    place = memory_ptr + ((slot * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
    memory = tl.load(place, mask=in_memory & has_state, other=0.0)
    forgetting = tl.exp(tl.load(a_log_ptr + head))
    dt_bias, passed = tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    if most_tokens > 1:
        for token in range(start, end):
            memory = _advance(
                memory,
                token,
                head,
                k,
                v,
                forgetting,
                dt_bias,
                passed,
                xkq_ptr,
                dt_ptr,
                out_ptr,
                dt_stride,
                heads,
                groups,
                k_dim,
                v_dim,
                dt_min,
                dt_max,
            )
            if kept_ptr is not None:
                kept = tl.load(kept_ptr + token).to(tl.int64)
                behind = memory_ptr + ((kept * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
                tl.store(behind, memory, mask=in_memory & (kept >= 0))
    else:  # A loop of one token would take a quarter more registers.
        memory = _advance(
            memory,
            start,
            head,
            k,
            v,
            forgetting,
            dt_bias,
            passed,
            xkq_ptr,
            dt_ptr,
            out_ptr,
            dt_stride,
            heads,
            groups,
            k_dim,
            v_dim,
            dt_min,
            dt_max,
        )
    tl.store(place, memory, mask=in_memory)


@jit(do_not_specialize=["slot_ptr", "new_ptr", "start_ptr"])
def _chunk_kernel(
    xkq_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    d_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    new_ptr: tl.tensor,
    start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dt_stride: tl.tensor,
    heads: tl.constexpr,
    groups: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    dt_min: tl.constexpr,
    dt_max: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    chunk: tl.constexpr,
    least_tokens: tl.constexpr,
) -> None:
    channels: tl.constexpr = heads * v_dim + 2 * groups * k_dim
    operand = xkq_ptr.dtype.element_ty  # of the products, whose sums are float32
    head, sequence = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(start_ptr + sequence).to(tl.int64), tl.load(start_ptr + sequence + 1).to(tl.int64)
    if end - start < least_tokens:
        return
    k, v, n = tl.arange(0, block_k), tl.program_id(0) * block_v + tl.arange(0, block_v), tl.arange(0, chunk)
    in_k, in_v = k < k_dim, v < v_dim
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    has_state = tl.load(new_ptr + sequence) == 0
    in_memory = in_k[:, None] & in_v[None, :]
    place = memory_ptr + ((slot * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
    memory = tl.load(place, mask=in_memory & has_state, other=0.0)
    forgetting = tl.exp(tl.load(a_log_ptr + head))
    dt_bias, passed = tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    key = heads * v_dim + (head // (heads // groups)) * k_dim + k
    for first in range(start, end, chunk):
        token = first + n
        inside = token < end
        row = xkq_ptr + token[:, None] * channels
        x_NV = tl.load(row + head * v_dim + v[None, :], mask=inside[:, None] & in_v[None, :], other=0.0)
        k_NK = tl.load(row + key[None, :], mask=inside[:, None] & in_k[None, :], other=0.0)
        q_NK = tl.load(row + groups * k_dim + key[None, :], mask=inside[:, None] & in_k[None, :], other=0.0)
        dt_N = softplus(tl.load(dt_ptr + token * dt_stride + head, mask=inside, other=0.0).to(tl.float32) + dt_bias)
        dt_N = tl.where(inside, tl.minimum(tl.maximum(dt_N, dt_min), dt_max), 0.0)
        decay_N = -forgetting * dt_N
        total_N = tl.cumsum(decay_N, axis=0)
        whole = tl.sum(decay_N, axis=0)
        scores_NN = tl.dot(q_NK, tl.trans(k_NK))
        # Above the diagonal, the difference would be positive and without bound.
        between_NN = tl.exp(tl.minimum(total_N[:, None] - total_N[None, :], 0.0)) * dt_N[None, :]
        scores_NN = tl.where(n[:, None] >= n[None, :], scores_NN * between_NN, 0.0)
        out_NV = passed * x_NV.to(tl.float32)
        out_NV = tl.dot(scores_NN.to(operand), x_NV, out_NV)
        decayed_NK = (q_NK.to(tl.float32) * tl.exp(total_N)[:, None]).to(operand)
        out_NV = tl.dot(decayed_NK, memory.to(operand), out_NV)
        left_NK = (k_NK.to(tl.float32) * (dt_N * tl.exp(whole - total_N))[:, None]).to(operand)
        memory = tl.dot(tl.trans(left_NK), x_NV, memory * tl.exp(whole))
        to = out_ptr + (token[:, None] * heads + head) * v_dim + v[None, :]
        tl.store(to, out_NV.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_v[None, :])
    tl.store(place, memory, mask=in_memory)


def state_space_triton(
    xkq_TC: Tensor, steps: HeadSteps, memory_SHKV: Tensor, num_groups: int, batch: RecurrentBatch
) -> Tensor:
    _, heads, k_dim, v_dim = memory_SHKV.shape
    assert xkq_TC.is_contiguous() and xkq_TC.shape[1] == heads * v_dim + 2 * num_groups * k_dim
    assert memory_SHKV.is_contiguous() and memory_SHKV.dtype is torch.float32
    assert steps.dt_TH.stride(1) == 1 and steps.a_log_H.dtype is steps.d_H.dtype is torch.float32
    out_THV = torch.empty(len(xkq_TC), heads, v_dim, dtype=xkq_TC.dtype, device=xkq_TC.device)
    block_k, widest = max(16, triton.next_power_of_2(k_dim)), BLOCK_V if k_dim <= LARGE_K else BLOCK_V // 2
    block_v = min(widest, max(16, triton.next_power_of_2(v_dim)))
    grid = triton.cdiv(v_dim, block_v), heads, len(batch.slot_B)
    tensors = xkq_TC, *steps[:-1], memory_SHKV, batch.slot_B, batch.is_new_B, batch.start_B
    dt_min, dt_max = steps.dt_limits
    sizes: dict[str, int | float] = {
        "heads": heads,
        "groups": num_groups,
        "k_dim": k_dim,
        "v_dim": v_dim,
        "block_k": block_k,
    }
    sizes |= {"dt_min": dt_min, "dt_max": dt_max, "block_v": block_v}
    # A walk is as exact as the twin, but slow for long prompts. float32 serves comparisons rather than users.
    # A chunk has no states to keep but the last.
    most_tokens = 1 if batch.kept_T is None else FEW_TOKENS
    if xkq_TC.dtype is torch.float32:
        most_tokens = ANY_NUMBER
    stride = steps.dt_TH.stride(0)
    if any(count <= most_tokens for count in batch.query_lens):
        _step_kernel[grid](*tensors, batch.kept_T, out_THV, stride, **sizes, most_tokens=most_tokens, num_warps=4)
    if any(count > most_tokens for count in batch.query_lens):
        sizes |= {"chunk": CHUNK, "least_tokens": most_tokens + 1}
        _chunk_kernel[grid](*tensors, out_THV, stride, **sizes, num_warps=8, num_stages=1)
    return out_THV
