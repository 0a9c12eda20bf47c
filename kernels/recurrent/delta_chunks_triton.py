"""The gated delta rule for prompts: chunks of tokens by matrix products. kernels/recurrent/delta_rule.py has its twin.

Idea: two launches. In the first, a program takes one chunk and one head. All chunks are independent, since what a
chunk's tokens do to each other does not depend on the memory before it: the program inverts the chunk's triangular
system S and applies the inverse to values and keys. In the second, a program has BLOCK_V columns of one head's memory
in registers. It goes through a sequence's chunks one after another, with four products each:

    u = values - keys @ M;  out = queries @ M + scores @ u;  M = exp(total decay) * M + late keys.T @ u

The inverse: blocks on the diagonal of S, of one row at first, are joined in pairs until one is left. With A and B on
the diagonal and C below A, the inverse of a pair has -inv(B) C inv(A) below inv(A) and inv(B). All pairs are joined at
once by two products of whole matrices. Powers of S - I would need fewer products, but where keys resemble each other
they are large and cancel each other.

Memory: what the first launch leaves for each chunk and head is in the dtype of the model: values and keys behind the
inverse, and scores, which are q k decayed. The decays are float32. Products use TF32, in which bf16 and float16 numbers
are exact. Those of float32 models and of the inverse use three products in TF32, which are nearly as exact as float32.
Sources: DeltaNet by chunks, arXiv 2406.06484; Gated DeltaNet, arXiv 2412.06464.
"""

# T tokens of the step · N tokens of a chunk · C chunks · H value heads · G key heads · K numbers of a key
# V numbers of a value · L sequences that are computed by chunks

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.recurrent.delta_rule import NORM_EPS, HeadGates
from lorafleet.kernels.recurrent.recurrent_batch import CHUNK, LongSequences, RecurrentBatch
from lorafleet.kernels.softplus_triton import softplus

BLOCK_V = 32
LEAST_TILE = 16  # smallest side of a tile that tensor cores multiply


@jit()
def _unit_rows(pointer: tl.tensor, inside: tl.tensor, eps: tl.constexpr) -> tl.tensor:
    """Returns rows divided by their lengths, in float32."""
    rows = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    return rows * tl.rsqrt(tl.sum(rows * rows, axis=1) + eps)[:, None]


@jit()
def _inverse(below: tl.tensor, size: tl.constexpr, levels: tl.constexpr, precision: tl.constexpr) -> tl.tensor:
    """Returns inv(I + below) [N, N], where `below` is zero on the diagonal and above it. N is 2 ** levels."""
    row, column = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for level in tl.static_range(levels):
        joined = (row >> level + 1 == column >> level + 1) & (row >> level != column >> level)
        corner = tl.where(joined, below, 0.0)
        if level == 0:  # the inverse is still I
            inverse -= corner
        else:
            carried = tl.dot(corner, inverse, input_precision=precision)
            inverse -= tl.dot(inverse, carried, input_precision=precision)
    return inverse


@jit(do_not_specialize=["row_ptr", "end_ptr"])
def _prepare_kernel(
    qkv_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    row_ptr: tl.tensor,
    end_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    total_ptr: tl.tensor,
    b_stride: tl.tensor,
    a_stride: tl.tensor,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    beta_scale: tl.constexpr,
    eps: tl.constexpr,
    size: tl.constexpr,
    levels: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    dtype: tl.constexpr = keys_ptr.dtype.element_ty
    keys: tl.constexpr = key_heads * k_dim
    channels: tl.constexpr = 2 * keys + heads * v_dim
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, k = tl.arange(0, size), tl.arange(0, block_k)
    token = tl.load(row_ptr + chunk).to(tl.int64) + n
    inside = token < tl.load(end_ptr + chunk)
    in_keys = inside[:, None] & (k < k_dim)[None, :]
    place = qkv_ptr + token[:, None] * channels + (head // (heads // key_heads)) * k_dim + k[None, :]

    a = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    decay = tl.where(inside, -tl.exp(tl.load(a_log_ptr + head)) * softplus(a), 0.0)
    total = tl.cumsum(decay, axis=0)  # decay from the chunk's beginning up to and with each token
    b = tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32)
    beta = tl.sigmoid(b) * beta_scale
    here = chunk * heads + head
    tl.store(total_ptr + here * size + n, total)
    # Decay of the correction of token j until token i. It would grow without bound above the diagonal.
    lower = n[:, None] >= n[None, :]
    between = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)

    k_NK = _unit_rows(place + keys, in_keys, eps)
    q_NK = _unit_rows(place, in_keys, eps) * (k_dim**-0.5)
    scores = tl.dot(q_NK, tl.trans(k_NK), input_precision=precision) * between
    tl.store(scores_ptr + (here * size + n[:, None]) * size + n[None, :], scores.to(dtype))
    alike = tl.dot(k_NK, tl.trans(k_NK), input_precision=precision)
    below = tl.where(n[:, None] > n[None, :], beta[:, None] * alike * between, 0.0)
    inverse = _inverse(below, size, levels, "tf32x3")
    # Keys are read again, since registers have no room for them beside the inverse.
    k_NK = _unit_rows(place + keys, in_keys, eps) * (beta * tl.exp(total))[:, None]
    w_NK = tl.dot(inverse, k_NK, input_precision=precision)
    tl.store(keys_ptr + (here * size + n[:, None]) * block_k + k[None, :], w_NK.to(dtype))
    for first in range(0, v_dim, block_v):
        v = first + tl.arange(0, block_v)
        in_values = inside[:, None] & (v < v_dim)[None, :]
        v_NV = tl.load(
            qkv_ptr + token[:, None] * channels + 2 * keys + head * v_dim + v[None, :], mask=in_values, other=0.0
        )
        u_NV = tl.dot(inverse, v_NV.to(tl.float32) * beta[:, None], input_precision=precision)
        at = (here * size + n[:, None]) * v_dim + v[None, :]
        tl.store(values_ptr + at, u_NV.to(dtype), mask=(v < v_dim)[None, :])


@jit(do_not_specialize=["slot_ptr", "new_ptr", "start_ptr", "long_ptr", "first_ptr"])
def _advance_kernel(
    qkv_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    total_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    new_ptr: tl.tensor,
    start_ptr: tl.tensor,
    long_ptr: tl.tensor,
    first_ptr: tl.tensor,
    out_ptr: tl.tensor,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    eps: tl.constexpr,
    size: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    precision: tl.constexpr,
) -> None:
    keys: tl.constexpr = key_heads * k_dim
    channels: tl.constexpr = 2 * keys + heads * v_dim
    head = tl.program_id(1)
    sequence = tl.load(long_ptr + tl.program_id(0))
    n, k, v = tl.arange(0, size), tl.arange(0, block_k), tl.program_id(2) * block_v + tl.arange(0, block_v)
    in_k, in_v = k < k_dim, v < v_dim
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    has_state = tl.load(new_ptr + sequence) == 0
    in_memory = in_k[:, None] & in_v[None, :]
    memory_place = memory_ptr + ((slot * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
    memory = tl.load(memory_place, mask=in_memory & has_state, other=0.0)
    start, end = tl.load(start_ptr + sequence).to(tl.int64), tl.load(start_ptr + sequence + 1).to(tl.int64)
    chunk = tl.load(first_ptr + tl.program_id(0)).to(tl.int64)
    key = (head // (heads // key_heads)) * k_dim + k
    for row in range(start, end, size):
        here = (chunk * heads + head) * size
        token = row + n
        inside = token < end
        in_keys = inside[:, None] & in_k[None, :]
        total = tl.load(total_ptr + here + n)
        last = tl.load(total_ptr + here + size - 1)
        w_NK = tl.load(keys_ptr + (here + n[:, None]) * block_k + k[None, :]).to(tl.float32)
        u_NV = tl.load(values_ptr + (here + n[:, None]) * v_dim + v[None, :], mask=in_v[None, :], other=0.0)
        u_NV = u_NV.to(tl.float32) - tl.dot(w_NK, memory, input_precision=precision)
        q_NK = _unit_rows(qkv_ptr + token[:, None] * channels + key[None, :], in_keys, eps)
        q_NK *= (tl.exp(total) * (k_dim**-0.5))[:, None]
        out_NV = tl.dot(q_NK, memory, input_precision=precision)
        scores = tl.load(scores_ptr + (here + n[:, None]) * size + n[None, :]).to(tl.float32)
        out_NV = tl.dot(scores, u_NV, out_NV, input_precision=precision)
        place = out_ptr + (token[:, None] * heads + head) * v_dim + v[None, :]
        tl.store(place, out_NV.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_v[None, :])
        k_NK = _unit_rows(qkv_ptr + token[:, None] * channels + keys + key[None, :], in_keys, eps)
        k_NK *= tl.exp(last - total)[:, None]
        memory = tl.dot(tl.trans(k_NK), u_NV, memory * tl.exp(last), input_precision=precision)
        chunk += 1
    tl.store(memory_place, memory, mask=in_memory)


def delta_chunks_triton(
    qkv_TC: Tensor,
    gates: HeadGates,
    memory_SHKV: Tensor,
    num_k_heads: int,
    batch: RecurrentBatch,
    long: LongSequences,
    out_THV: Tensor,
) -> None:
    """Writes the rows of the long sequences into out, and advances their memories in place."""
    _, heads, k_dim, v_dim = memory_SHKV.shape
    num_chunks, dtype, device = len(long.row_C), qkv_TC.dtype, qkv_TC.device
    block_k = max(LEAST_TILE, triton.next_power_of_2(k_dim))
    block_v = max(LEAST_TILE, min(BLOCK_V, triton.next_power_of_2(v_dim)))
    keys_CHNK = torch.empty(num_chunks, heads, CHUNK, block_k, dtype=dtype, device=device)
    values_CHNV = torch.empty(num_chunks, heads, CHUNK, v_dim, dtype=dtype, device=device)
    scores_CHNN = torch.empty(num_chunks, heads, CHUNK, CHUNK, dtype=dtype, device=device)
    total_CHN = torch.empty(num_chunks, heads, CHUNK, dtype=torch.float32, device=device)
    sizes = {
        "heads": heads,
        "key_heads": num_k_heads,
        "k_dim": k_dim,
        "v_dim": v_dim,
        "eps": NORM_EPS,
        "size": CHUNK,
        "block_k": block_k,
        "block_v": block_v,
        "precision": "tf32x3" if dtype is torch.float32 else "tf32",
        "num_warps": 4,
        # Loading float32 tiles ahead would take more shared memory than there is.
        "num_stages": 1 if dtype is torch.float32 else 3,
    }
    left = keys_CHNK, values_CHNV, scores_CHNN, total_CHN
    strides = gates.b_TH.stride(0), gates.a_TH.stride(0)
    levels = CHUNK.bit_length() - 1
    _prepare_kernel[num_chunks, heads](
        *(qkv_TC, *gates.tensors, long.row_C, long.end_C, *left, *strides),
        beta_scale=gates.beta_scale,
        levels=levels,
        **sizes,
    )
    _advance_kernel[len(long.index_L), heads, triton.cdiv(v_dim, block_v)](
        qkv_TC,
        *left,
        memory_SHKV,
        batch.slot_B,
        batch.is_new_B,
        batch.start_B,
        long.index_L,
        long.first_chunk_L,
        out_THV,
        **sizes,
    )
