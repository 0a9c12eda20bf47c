"""Triton attention of prompts over a paged KV cache: chunks of prompts, with decodes among them, in one launch.

Idea: one program takes a tile of one sequence's query tokens and one KV head. The query heads that share the KV head
are folded into the tile's rows, row = token * R + head. If many wide heads share a KV head, as in latent attention, a
tile has only some of them. The program walks the visible keys through the block table with an online softmax in fp32.
A head's sink is a logit in the softmax's denominator that belongs to no key. The online softmax starts with it as if it
had been seen. decode_attention_triton.py is for steps of decodes alone.

Memory: q is [T, H, D] and out [T, H, V]. The caches are [N, P, G, D] and [N, P, G, V], with blocks in any order, in
q's dtype or in e4m3, whose numbers q's dtype holds exactly. value_stride is the distance of two tokens' values, which
may lie inside the keys. tiles is [K, 2] int32, with rows (sequence, first query token in it). A head size that is not a
power of two (80, 96) is padded in registers, not in memory. A wide one (576) is taken in two parts, a power of two and
the tail behind it.
Source: FlashAttention-2, arXiv 2307.08691.
"""

# T tokens of the step · B sequences · K tiles · H query heads · G KV heads · R query heads of a tile
# D numbers of a query or key · V of a value, usually D · N KV blocks · P block size

from __future__ import annotations

import math

import triton.language as tl

from lorafleet.kernels.jit import jit

LOG2_E = tl.constexpr(math.log2(math.e))
TWO_LOG2_E = tl.constexpr(2 * math.log2(math.e))


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["table_stride", "window"])
def attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    context_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sinks_ptr: tl.tensor | None,
    table_stride: tl.tensor,
    q_stride: tl.tensor,
    window: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor,
    v_scale: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    value_stride: tl.constexpr,
    group: tl.constexpr,
    page: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    tail_d: tl.constexpr,
    block_v: tl.constexpr,
    chunk: tl.constexpr,
    has_softcap: tl.constexpr,
) -> None:
    tokens_of_tile: tl.constexpr = block_m // group
    tile = tl.program_id(0)
    first_head = tl.program_id(1) * group
    kv_head = first_head // (heads // kv_heads)
    seq = tl.load(tiles_ptr + tile * 2)
    first = tl.load(tiles_ptr + tile * 2 + 1)
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    context = tl.load(context_ptr + seq)

    first_position = context - query_len + first
    low = tl.maximum(first_position - window + 1, 0)
    if chunk > 0:
        low = tl.maximum(low, first_position // chunk * chunk)
    high = tl.minimum(first_position + tokens_of_tile, context)

    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    value_d = tl.arange(0, block_v)
    token = first + m // group
    head = first_head + m % group
    row_mask = (m < tokens_of_tile * group) & (token < query_len)
    position = context - query_len + token
    inside_head = d < head_dim
    inside_value = value_d < value_dim
    q_row = (start + token).to(tl.int64) * q_stride + head * head_dim
    q = tl.load(q_ptr + q_row[:, None] + d[None, :], mask=row_mask[:, None] & inside_head[None, :], other=0.0)
    if tail_d > 0:
        tail = block_d + tl.arange(0, tail_d)
        inside_tail = tail < head_dim
        q_tail_mask = row_mask[:, None] & inside_tail[None, :]
        q_tail = tl.load(q_ptr + q_row[:, None] + tail[None, :], mask=q_tail_mask, other=0.0)

    score_scale = scale_log2
    if k_ptr.dtype.element_ty == tl.float8e4nv and q_ptr.dtype.element_ty == tl.bfloat16:
        # e4m3 becomes fp16 in one instruction and bf16 in several: an H200 takes 148 us instead of 175 (256 x 576
        # tokens). The queries are scaled, so that none is too large for fp16.
        q = (q.to(tl.float32) * scale_log2).to(tl.float16)
        if tail_d > 0:
            q_tail = (q_tail.to(tl.float32) * scale_log2).to(tl.float16)
        score_scale = 1.0
    acc = tl.zeros((block_m, block_v), dtype=tl.float32)
    if sinks_ptr is not None:
        total = tl.full((block_m,), 1.0, dtype=tl.float32)
        largest = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
    else:
        total = tl.zeros((block_m,), dtype=tl.float32)
        largest = tl.full((block_m,), float("-inf"), dtype=tl.float32)
    for first_key in range(low // block_n * block_n, high, block_n):
        n = first_key + tl.arange(0, block_n)
        block = tl.load(tables_ptr + seq * table_stride + n // page, mask=n < high, other=0)
        k_row = (block.to(tl.int64) * page + n % page) * (kv_heads * head_dim) + kv_head * head_dim
        v_row = k_row
        if value_dim != head_dim:
            v_row = (block.to(tl.int64) * page + n % page) * value_stride + kv_head * value_dim
        k = tl.load(k_ptr + k_row[None, :] + d[:, None], mask=inside_head[:, None] & (n < high)[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if tail_d > 0:
            k_tail_mask = inside_tail[:, None] & (n < high)[None, :]
            k_tail = tl.load(k_ptr + k_row[None, :] + tail[:, None], mask=k_tail_mask, other=0.0)
            scores = tl.dot(q_tail, k_tail.to(q.dtype), scores, input_precision="ieee")
        scores *= score_scale
        if has_softcap:
            scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (TWO_LOG2_E / softcap_log2)) + 1.0))  # tanh
        visible = (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window)
        if chunk > 0:
            visible &= n[None, :] >= (position // chunk * chunk)[:, None]
        scores = tl.where(visible & ((n >= low) & (n < high))[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row without a key so far (its window begins later) still has -inf: subtracting that would give NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        shrunk = tl.exp2(largest - shift)
        total = total * shrunk + tl.sum(weights, 1)
        v_mask = (n < high)[:, None] & inside_value[None, :]
        v = tl.load(v_ptr + v_row[:, None] + value_d[None, :], mask=v_mask, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrunk[:, None], input_precision="ieee")
        largest = new_largest
    out = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_mask = row_mask[:, None] & inside_value[None, :]
    row = (start + token).to(tl.int64) * heads + head
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * value_dim)[:, None] + value_d[None, :], out, mask=out_mask)
