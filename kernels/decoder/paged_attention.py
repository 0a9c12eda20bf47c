"""Triton attention over a paged KV cache: prefill chunks, decodes and any mix of them in one launch.

Idea: one program takes a tile of one sequence's query tokens and one KV head. The query heads that share the KV head
are folded into the tile's rows, row = token * R + head, so that even a decode fills tl.dot's sixteen rows from one
read of the keys. The program walks the visible keys through the block table with an online softmax in fp32. A step of
decodes alone also splits each context into chunks of SPLIT_KEYS, so that few long sequences fill the GPU; a second
kernel merges the chunks in order. The chunks depend on the sequence alone, so its result does not depend on the rest
of the batch.

Memory: q and out are [T, H, D]. The caches are [N, P, G, D], with blocks in any order, in q's dtype or in e4m3, whose
numbers q's dtype holds exactly. tiles is [K, 2] int32, with rows (sequence, first query token in it). Partial results
of split decodes are [S, B, H, D] fp32, normalized, with the logarithm of their sums, [S, B, H]. A head size that is
not a power of two (80, 96) is padded in registers, not in memory.
Source: FlashAttention-2, arXiv 2307.08691; split keys: Flash-Decoding.
"""

# T tokens of the step · B sequences · K tiles · S splits · H query heads · G KV heads · R query heads of a KV head
# D head size · N KV blocks · P block size · L longest block table

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

PREFILL_ROWS = 64  # rows of a tile in steps that have a prefill, in half precision
LEAST_ROWS = 16  # tl.dot's smallest M
KEY_BYTES = 16384  # bytes of one loop step's keys: 64 keys of 128 bf16 numbers
SPLIT_KEYS = 512  # keys that a program of a decode step takes
LOG2_E = math.log2(math.e)
TWO_LOG2_E = tl.constexpr(2 * LOG2_E)
NO_WINDOW = 1 << 30  # a window that contains every key


# Sizes that change from step to step are not specialized: a new batch must never wait for a compiler.
@jit(do_not_specialize=["table_stride", "num_seqs", "window"])
def _attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    context_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    table_stride: tl.tensor,
    q_stride: tl.tensor,
    num_seqs: tl.tensor,
    window: tl.tensor,
    scale_log2: tl.tensor,
    softcap_log2: tl.tensor,
    v_scale: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
    split_keys: tl.constexpr,
    has_softcap: tl.constexpr,
) -> None:
    group: tl.constexpr = heads // kv_heads
    tokens_of_tile: tl.constexpr = block_m // group
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(tiles_ptr + tile * 2)
    first = tl.load(tiles_ptr + tile * 2 + 1)
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    context = tl.load(context_ptr + seq)

    first_position = context - query_len + first
    low = tl.maximum(first_position - window + 1, 0)
    high = tl.minimum(first_position + tokens_of_tile, context)
    if split_keys > 0:
        low = tl.maximum(low, split * split_keys)
        high = tl.minimum(high, (split + 1) * split_keys)
        if low >= high:
            return

    m = tl.arange(0, block_m)
    d = tl.arange(0, block_d)
    token = first + m // group
    head = kv_head * group + m % group
    row_mask = (m < tokens_of_tile * group) & (token < query_len)
    position = context - query_len + token
    inside_head = d < head_dim
    q_row = (start + token).to(tl.int64) * q_stride + head * head_dim
    q = tl.load(q_ptr + q_row[:, None] + d[None, :], mask=row_mask[:, None] & inside_head[None, :], other=0.0)

    if k_ptr.dtype.element_ty == tl.float8e4nv and q_ptr.dtype.element_ty == tl.bfloat16:
        # e4m3 becomes fp16 in one instruction and bf16 in several: an H200 takes 148 us instead of 175 (256 x 576
        # tokens). The queries are scaled, so that none is too large for fp16.
        q = (q.to(tl.float32) * scale_log2).to(tl.float16)
        scale_log2 = 1.0
    acc = tl.zeros((block_m, block_d), dtype=tl.float32)
    total = tl.zeros((block_m,), dtype=tl.float32)
    largest = tl.full((block_m,), float("-inf"), dtype=tl.float32)
    for first_key in range(low // block_n * block_n, high, block_n):
        n = first_key + tl.arange(0, block_n)
        block = tl.load(tables_ptr + seq * table_stride + n // page, mask=n < high, other=0)
        kv_row = (block.to(tl.int64) * page + n % page) * (kv_heads * head_dim) + kv_head * head_dim
        k = tl.load(k_ptr + kv_row[None, :] + d[:, None], mask=inside_head[:, None] & (n < high)[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
        if has_softcap:
            scores = softcap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (TWO_LOG2_E / softcap_log2)) + 1.0))  # tanh
        visible = (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window)
        scores = tl.where(visible & ((n >= low) & (n < high))[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row without a key so far (its window begins later) still has -inf: subtracting that would give NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        shrunk = tl.exp2(largest - shift)
        total = total * shrunk + tl.sum(weights, 1)
        v = tl.load(v_ptr + kv_row[:, None] + d[None, :], mask=(n < high)[:, None] & inside_head[None, :], other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrunk[:, None], input_precision="ieee")
        largest = new_largest
    out = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_mask = row_mask[:, None] & inside_head[None, :]
    if split_keys > 0:
        row = (split * num_seqs + start + token).to(tl.int64) * heads + head
        tl.store(out_ptr + (row * head_dim)[:, None] + d[None, :], out, mask=out_mask)
        tl.store(sums_ptr + row, largest + tl.log2(total), mask=row_mask)
    else:
        row = (start + token).to(tl.int64) * heads + head
        tl.store(out_ptr + (row * head_dim)[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)


@jit(do_not_specialize=["num_seqs", "window"])
def _merge_kernel(
    partial_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    context_ptr: tl.tensor,
    num_seqs: tl.tensor,
    window: tl.tensor,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_d: tl.constexpr,
    split_keys: tl.constexpr,
) -> None:
    seq = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.load(context_ptr + seq)
    d = tl.arange(0, block_d)
    inside_head = d < head_dim
    acc = tl.zeros((block_d,), dtype=tl.float32)
    total = 0.0
    largest = float("-inf")
    for split in range(tl.maximum(context - window, 0) // split_keys, tl.cdiv(context, split_keys)):
        row = (split * num_seqs + seq).to(tl.int64) * heads + head
        log_sum = tl.load(sums_ptr + row)
        new_largest = tl.maximum(largest, log_sum)
        shrunk = tl.exp2(largest - new_largest)
        weight = tl.exp2(log_sum - new_largest)
        acc = acc * shrunk + weight * tl.load(partial_ptr + row * head_dim + d, mask=inside_head, other=0.0)
        total = total * shrunk + weight
        largest = new_largest
    row = (seq * heads + head).to(tl.int64)
    tl.store(out_ptr + row * head_dim + d, (acc / total).to(out_ptr.dtype.element_ty), mask=inside_head)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's sequences in device memory, shared by all layers."""

    num_tokens: int
    num_splits: int  # 0 if the step has a prefill: then one program walks its whole context
    block_m: int
    tiles_K2: Tensor
    starts_B: Tensor  # each sequence's first token, and T at the end
    context_B: Tensor
    tables_BL: Tensor

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        page: int,
        heads_of_kv_head: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedBatch:
        """Builds the batch of one step, with one copy to the device for everything."""
        decode_only = max(query_lens) == 1
        # tl.dot in fp32 holds its operands in registers: larger tiles spill.
        rows = LEAST_ROWS if decode_only or dtype is torch.float32 else PREFILL_ROWS
        block_m = max(rows, triton.next_power_of_2(heads_of_kv_head))
        tokens_of_tile = block_m // heads_of_kv_head
        tiles = [(b, first) for b, length in enumerate(query_lens) for first in range(0, length, tokens_of_tile)]
        if not decode_only:
            # The longest walks come first, so that the last programs to finish are short ones.
            tiles.sort(key=lambda tile: query_lens[tile[0]] - context_lens[tile[0]] - tile[1])
        num_blocks = [-(-length // page) for length in context_lens]
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        tables = np.zeros((len(query_lens), max(num_blocks)), dtype=np.int32)
        for b, count in enumerate(num_blocks):
            tables[b, :count] = block_tables[b][:count]
        parts = [np.asarray(tiles), starts, np.asarray(context_lens), tables]
        packed = torch.from_numpy(np.concatenate([part.ravel() for part in parts]).astype(np.int32))
        if device.type == "cuda":
            packed = packed.pin_memory()  # a copy from unpinned memory would wait for the steps before it
        flat = torch.split(packed.to(device, non_blocking=True), [part.size for part in parts])
        return cls(
            num_tokens=int(starts[-1]),
            num_splits=-(-max(context_lens) // SPLIT_KEYS) if decode_only else 0,
            block_m=block_m,
            tiles_K2=flat[0].view(-1, 2),
            starts_B=flat[1],
            context_B=flat[2],
            tables_BL=flat[3].view(tables.shape),
        )


def paged_attention(
    q_THD: Tensor,
    k_NPGD: Tensor,
    v_NPGD: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Returns causal attention of the step's tokens over their sequences' cached keys, [T, H, D] in q's dtype.

    The step's own keys are among the cached ones. The cache's blocks past a sequence's context are never read.

    Args:
        window: Number of tokens that a query sees, counting its own.
        k_scale, v_scale: Factors of the caches' numbers.
        softcap: Bound of the scores, see AttentionSpec.
    """
    tokens, heads, head_dim = q_THD.shape
    page, kv_heads = k_NPGD.shape[1:3]
    assert tokens == batch.num_tokens
    assert heads % kv_heads == 0
    assert k_NPGD.shape == v_NPGD.shape
    assert k_NPGD.shape[3] == head_dim
    assert k_NPGD.is_contiguous()
    assert v_NPGD.is_contiguous()
    assert q_THD.stride()[1:] == (head_dim, 1)
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n = min(64, max(16, KEY_BYTES // (block_d * q_THD.element_size())))
    window = NO_WINDOW if window is None else window
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    splits = batch.num_splits
    merged = splits > 1
    partial = torch.empty(splits, *q_THD.shape, dtype=torch.float32, device=q_THD.device) if merged else out_THD
    sums = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q_THD.device) if merged else out_THD
    _attention_kernel[(batch.tiles_K2.shape[0], kv_heads, max(1, splits))](
        q_THD,
        k_NPGD,
        v_NPGD,
        partial,
        sums,
        batch.tiles_K2,
        batch.starts_B,
        batch.context_B,
        batch.tables_BL,
        batch.tables_BL.stride(0),
        q_THD.stride(0),
        tokens,
        window,
        scale * k_scale * LOG2_E,
        1.0 if softcap is None else softcap * LOG2_E,
        v_scale,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page=page,
        block_m=batch.block_m,
        block_n=block_n,
        block_d=block_d,
        split_keys=SPLIT_KEYS if merged else 0,
        has_softcap=softcap is not None,
        num_stages=2,
    )
    if merged:
        _merge_kernel[(tokens, heads)](
            partial,
            sums,
            out_THD,
            batch.context_B,
            tokens,
            window,
            heads=heads,
            head_dim=head_dim,
            block_d=block_d,
            split_keys=SPLIT_KEYS,
            num_warps=1,
        )
    return out_THD
