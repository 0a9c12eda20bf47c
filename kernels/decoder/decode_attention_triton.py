"""Triton attention of decodes over a paged KV cache, with grids that do not depend on the sequences' lengths.

Idea: the host divides each sequence's visible keys into spans (kernels/decoder/key_spans.py). A program takes a span
and a tile of query heads that share a KV head, so that one read of the keys and values serves all of them. It walks the
span through the block table with an online softmax in fp32. Loads of later keys run meanwhile: Triton makes a pipeline
of the loop, with its first stage for the block numbers. The only span of a sequence writes the result. Other spans
write partial results, which a second kernel merges. Programs without a span and merges without a sequence return at
once, so a captured launch serves any batch.

If sequences have drafts, a program takes all rows of its sequence, up to most_rows, and one read of the keys and values
serves them too. Row r of a sequence sees one key less than row r + 1. rows is [B, 3] then: a sequence's first row, the
number of its rows, and its keys. Each row of a tile has window and chunk of its own. A program of the second kernel
takes one row of several merges, since as many programs as rows and merges would take half as long as the first kernel
even if none had a sequence.

If values lie in the keys, as in latent attention, a tile of keys is read once and multiplied twice. Keys of 576 numbers
are taken as a power of two, which holds the values, and the tail behind it.

Memory: q is [T, H, D] and out [T, H, V]. The caches are [N, P, G, D] and [N, P, G, V] in q's dtype or in e4m3.
value_stride is the distance of two tokens' values. spans and merges are as in key_spans.py. Partial results are fp32
[M, R, H, V], normalized, with the base-2 logarithm of their sums, [M, R, H]. A head's sink is a logit in the softmax's
denominator that belongs to no key. An only span begins with it, and otherwise the merge does.
Source: Flash-Decoding; latent attention in the absorbed form: DeepSeek-V2, arXiv 2405.04434.
"""

# T rows · B sequences · H query heads · G KV heads · D numbers of a query or key · V of a value, usually D
# N KV blocks · P block size · M partial results · R rows of a sequence

from __future__ import annotations

import math

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.jit import jit

LOG2_E = tl.constexpr(math.log2(math.e))
TWO_LOG2_E = tl.constexpr(2 * math.log2(math.e))


@jit(do_not_specialize=["spans_ptr", "blocks_ptr", "rows_ptr"])
def decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    spans_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    rows_ptr: tl.tensor | None,
    sinks_ptr: tl.tensor | None,
    q_stride: tl.tensor,
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
    values_in_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    stages: tl.constexpr,
    most_rows: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    span = spans_ptr + tl.program_id(1) * 5
    seq = tl.load(span)
    low = tl.load(span + 1)
    high = tl.load(span + 2)
    partial = tl.load(span + 3)
    first_block = tl.load(span + 4)
    if seq < 0:
        return
    first_head = tl.program_id(0) * group
    kv_head = first_head // (heads // kv_heads)
    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    value_d = tl.arange(0, block_v)
    if most_rows == 1:
        place = m * 0
        head = first_head + m
        row_mask = m < group
        row_of = seq.to(tl.int64) + place
    else:
        place = m // group  # number of the row in its sequence
        head = first_head + m % group
        num_rows = tl.load(rows_ptr + seq * 3 + 1)
        row_mask = place < num_rows
        row_of = tl.load(rows_ptr + seq * 3).to(tl.int64) + place
        length = tl.load(rows_ptr + seq * 3 + 2)
        end = length - num_rows + 1 + place  # number of keys up to the row's own
        # A sequence may be shorter than its spans say. What lies behind it may be infinite, and no weight hides that.
        high = tl.minimum(high, length)
    inside_head = d < head_dim
    inside_value = value_d < value_dim
    q_row = row_of * q_stride + head * head_dim
    q = tl.load(q_ptr + q_row[:, None] + d[None, :], mask=row_mask[:, None] & inside_head[None, :], other=0.0)
    if tail_d > 0:
        tail = block_d + tl.arange(0, tail_d)
        inside_tail = tail < head_dim
        q_tail_mask = row_mask[:, None] & inside_tail[None, :]
        q_tail = tl.load(q_ptr + q_row[:, None] + tail[None, :], mask=q_tail_mask, other=0.0)
    score_scale = scale_log2
    if k_ptr.dtype.element_ty == tl.float8e4nv and q_ptr.dtype.element_ty == tl.bfloat16:
        # e4m3 becomes fp16 in one instruction and bf16 in several. The queries are scaled, so that none is too large.
        q = (q.to(tl.float32) * scale_log2).to(tl.float16)
        if tail_d > 0:
            q_tail = (q_tail.to(tl.float32) * scale_log2).to(tl.float16)
        score_scale = 1.0

    is_only = partial < 0
    total = tl.zeros((block_m,), dtype=tl.float32)
    largest = tl.full((block_m,), float("-inf"), dtype=tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        total = tl.where(is_only, 1.0, total)
        largest = tl.where(is_only, sink, largest)
    acc = tl.zeros((block_m, block_v), dtype=tl.float32)
    for first_key in tl.range(low, high, block_n, num_stages=stages):
        n = first_key + tl.arange(0, block_n)
        inside = n < high
        block = tl.load(blocks_ptr + first_block + n // page, mask=inside, other=0)
        token = block.to(tl.int64) * page + n % page
        k_row = token * (kv_heads * head_dim) + kv_head * head_dim
        k_mask = inside[:, None] & inside_head[None, :]
        k = tl.load(k_ptr + k_row[:, None] + d[None, :], mask=k_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if tail_d > 0:
            k_tail_mask = inside[:, None] & inside_tail[None, :]
            k_tail = tl.load(k_ptr + k_row[:, None] + tail[None, :], mask=k_tail_mask, other=0.0).to(q.dtype)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        scores *= score_scale
        if has_softcap:
            scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (TWO_LOG2_E / softcap_log2)) + 1.0))  # tanh
        seen = inside[None, :]
        if most_rows > 1:
            seen = seen & (n[None, :] < end[:, None])
            if window > 0:
                seen = seen & (n[None, :] >= end[:, None] - window)
            if chunk > 0:
                seen = seen & (n[None, :] >= ((end - 1) // chunk * chunk)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = new_largest
        if most_rows > 1:  # a row may see no key of a span
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(largest - base)
        total = total * shrunk + tl.sum(weights, 1)
        if values_in_keys:
            v = k
        else:
            v_row = token * value_stride + kv_head * value_dim
            v_mask = inside[:, None] & inside_value[None, :]
            v = tl.load(v_ptr + v_row[:, None] + value_d[None, :], mask=v_mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrunk[:, None], input_precision="ieee")
        largest = new_largest
    out = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_mask = row_mask[:, None] & inside_value[None, :]
    if is_only:
        row = row_of * heads + head
        out_at = out_ptr + (row * value_dim)[:, None] + value_d[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        row = (partial.to(tl.int64) * most_rows + place) * heads + head
        tl.store(partial_ptr + (row * value_dim)[:, None] + value_d[None, :], out, mask=out_mask)
        tl.store(sums_ptr + row, largest + tl.log2(total), mask=row_mask)


@jit(do_not_specialize=["merges_ptr", "rows_ptr", "num_merges"])
def merge_kernel(
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    merges_ptr: tl.tensor,
    rows_ptr: tl.tensor | None,
    sinks_ptr: tl.tensor | None,
    num_merges: tl.tensor,
    heads: tl.constexpr,
    value_dim: tl.constexpr,
    block_v: tl.constexpr,
    block_s: tl.constexpr,
    most_rows: tl.constexpr,
    early: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    if most_rows == 1:
        merge = merges_ptr + tl.program_id(1) * 3
        seq = tl.load(merge)
        if seq < 0:
            return
        _merge_row(
            partial_ptr, sums_ptr, out_ptr, sinks_ptr, merge, seq, head, 0,
            heads, value_dim, block_v, block_s, most_rows,
        )  # fmt: skip
    else:
        place = tl.program_id(2)
        for index in range(tl.program_id(1), num_merges, tl.num_programs(1)):
            merge = merges_ptr + index * 3
            seq = tl.load(merge)
            num_rows = tl.load(rows_ptr + seq * 3 + 1, mask=seq >= 0, other=0)
            if place < num_rows:
                row_of = tl.load(rows_ptr + seq * 3) + place
                _merge_row(
                    partial_ptr, sums_ptr, out_ptr, sinks_ptr, merge, row_of, head, place,
                    heads, value_dim, block_v, block_s, most_rows,
                )  # fmt: skip


@jit()
def _merge_row(
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor | None,
    merge: tl.tensor,
    row_of: tl.tensor,
    head: tl.tensor,
    place: tl.tensor,
    heads: tl.constexpr,
    value_dim: tl.constexpr,
    block_v: tl.constexpr,
    block_s: tl.constexpr,
    most_rows: tl.constexpr,
) -> None:
    """Writes a head's result of one row of the step, which is at this place among those of its sequence."""
    first = tl.load(merge + 1)
    count = tl.load(merge + 2)
    d = tl.arange(0, block_v)
    s = tl.arange(0, block_s)
    inside_value = d < value_dim
    acc = tl.zeros((block_v,), dtype=tl.float32)
    total = 0.0
    largest = float("-inf")
    if sinks_ptr is not None:
        total = 1.0
        largest = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
    for start in range(0, count, block_s):
        inside = start + s < count
        row = ((first + start + s).to(tl.int64) * most_rows + place) * heads + head
        log_sums = tl.load(sums_ptr + row, mask=inside, other=float("-inf"))
        at = partial_ptr + (row * value_dim)[:, None] + d[None, :]
        values = tl.load(at, mask=inside[:, None] & inside_value[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(log_sums, 0))
        base = new_largest
        if most_rows > 1:
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrunk = tl.exp2(largest - base)
        weights = tl.exp2(log_sums - base)
        acc = acc * shrunk + tl.sum(values * weights[:, None], 0)
        total = total * shrunk + tl.sum(weights, 0)
        largest = new_largest
    row = row_of.to(tl.int64) * heads + head
    tl.store(out_ptr + row * value_dim + d, (acc / total).to(out_ptr.dtype.element_ty), mask=inside_value)
