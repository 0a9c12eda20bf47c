"""Attention of prompts over a paged KV cache with the project's Triton kernel, paged_attention_triton.py: the layout of
a step's sequences in device memory, and the launch. decode_attention.py computes steps of decodes. The torch twin is
TorchAttention."""

# T tokens of the step · B sequences · K tiles · H query heads · G KV heads · R query heads of a KV head
# D numbers of a query or key · V of a value, usually D · N KV blocks · P block size · L longest block table

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from lorafleet.kernels.decoder.head_tiles import LEAST_ROWS, heads_of_tile, is_wide, parts_of_head, values_like_keys
from lorafleet.kernels.decoder.paged_attention_triton import attention_kernel
from lorafleet.kernels.quant.fp8 import FP8

PREFILL_ROWS = 64  # rows of a tile in half precision
WIDE_PREFILL_ROWS = 32  # the same for wide heads, so that a tile's result fits into registers
WIDE_HEADS = 32  # wide query heads in a tile at most; more would not fit into shared memory
KEY_BYTES = 16384  # bytes of one loop step's keys: 64 keys of 128 bf16 numbers
ALIGNED_INTS = 4  # int32 numbers in 16 bytes
LOG2_E = math.log2(math.e)
NO_WINDOW = 1 << 30  # a window that contains every key


def tile_shape(heads_of_kv_head: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the rows of a tile, and the query heads of a KV head that share it. head_dim is the larger one of keys
    and values."""
    # tl.dot in fp32 holds its operands in registers: larger tiles spill.
    rows, most_heads = WIDE_PREFILL_ROWS if is_wide(head_dim) else PREFILL_ROWS, WIDE_HEADS
    if dtype is torch.float32:
        rows, most_heads = LEAST_ROWS, min(WIDE_HEADS, LEAST_ROWS)
    tile_heads = heads_of_tile(heads_of_kv_head, head_dim, most_heads)
    return max(rows, triton.next_power_of_2(tile_heads)), tile_heads


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's sequences in device memory, shared by all layers whose heads have one shape."""

    num_tokens: int
    block_m: int
    tile_heads: int  # query heads of a KV head that share a tile
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
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PagedBatch:
        """Builds the batch of one step, with one copy to the device for everything. The last arguments but the device
        are those of tile_shape."""
        block_m, tile_heads = tile_shape(heads_of_kv_head, head_dim, dtype)
        tokens_of_tile = block_m // tile_heads
        tiles = [(b, first) for b, length in enumerate(query_lens) for first in range(0, length, tokens_of_tile)]
        # The longest walks come first, so that the last programs to finish are short ones.
        tiles.sort(key=lambda tile: query_lens[tile[0]] - context_lens[tile[0]] - tile[1])
        num_blocks = [-(-length // page) for length in context_lens]
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        tables = np.zeros((len(query_lens), max(num_blocks)), dtype=np.int32)
        for b, count in enumerate(num_blocks):
            tables[b, :count] = block_tables[b][:count]
        parts = [np.asarray(tiles).ravel(), starts, np.asarray(context_lens), tables.ravel()]
        # Each part begins at a multiple of 16 bytes. Triton compiles a variant for each mix of alignments.
        sizes = [-(-part.size // ALIGNED_INTS) * ALIGNED_INTS for part in parts]
        padded = [np.pad(part, (0, size - part.size)) for part, size in zip(parts, sizes, strict=True)]
        packed = torch.from_numpy(np.concatenate(padded).astype(np.int32))
        if device.type == "cuda":
            packed = packed.pin_memory()  # a copy from unpinned memory would wait for the steps before it
        split = torch.split(packed.to(device, non_blocking=True), sizes)
        flat = [part_N[: part.size] for part_N, part in zip(split, parts, strict=True)]
        return cls(
            num_tokens=int(starts[-1]),
            block_m=block_m,
            tile_heads=tile_heads,
            tiles_K2=flat[0].view(-1, 2),
            starts_B=flat[1],
            context_B=flat[2],
            tables_BL=flat[3].view(tables.shape),
        )


def paged_attention(
    q_THD: Tensor,
    k_NPGD: Tensor,
    v_NPGV: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks_H: Tensor | None = None,
    out_THV: Tensor | None = None,
) -> Tensor:
    """Returns causal attention of the step's tokens over their sequences' cached keys, [T, H, V] in q's dtype.

    The step's own keys are among the cached ones. The cache's blocks past a sequence's context are never read.

    Args:
        window: Number of tokens that a query sees, counting its own.
        k_scale, v_scale: Factors of the caches' numbers.
        softcap: Bound of the scores, see LayerAttention.
        chunk: A query sees only keys with its own position // chunk. Kernels are compiled for each value.
        sinks_H: Each head's logit that is added to the softmax's denominator, of any float dtype.
        out_THV: Where the result is written. None means a new tensor.
    """
    tokens, heads, head_dim = q_THD.shape
    page, kv_heads = k_NPGD.shape[1:3]
    assert tokens == batch.num_tokens
    assert heads % kv_heads == 0
    assert k_NPGD.shape[:3] == v_NPGV.shape[:3]
    assert k_NPGD.shape[3] == head_dim
    assert sinks_H is None or (sinks_H.shape == (heads,) and sinks_H.is_contiguous())
    assert k_NPGD.is_contiguous()
    value_dim = v_NPGV.shape[3]
    # Values are contiguous, or lie in the keys of the one KV head.
    assert v_NPGV.is_contiguous() or (kv_heads == 1 and v_NPGV.stride() == k_NPGD.stride() and value_dim != head_dim)
    assert q_THD.stride()[1:] == (head_dim, 1)
    block_d, tail_d = parts_of_head(head_dim)
    block_v = max(16, triton.next_power_of_2(value_dim))
    if k_NPGD.dtype == FP8:
        block_v = values_like_keys(block_v, block_d)
    block_n = min(64, max(16, KEY_BYTES // (max(block_d, block_v) * q_THD.element_size())))
    window = NO_WINDOW if window is None else window
    chunk = 0 if chunk is None else chunk
    if out_THV is None:
        out_THV = torch.empty(tokens, heads, value_dim, dtype=q_THD.dtype, device=q_THD.device)
    assert out_THV.shape == (tokens, heads, value_dim) and out_THV.is_contiguous()
    assert heads // kv_heads % batch.tile_heads == 0
    attention_kernel[(batch.tiles_K2.shape[0], heads // batch.tile_heads)](
        q_THD,
        k_NPGD,
        v_NPGV,
        out_THV,
        batch.tiles_K2,
        batch.starts_B,
        batch.context_B,
        batch.tables_BL,
        sinks_H,
        batch.tables_BL.stride(0),
        q_THD.stride(0),
        window,
        scale * k_scale * LOG2_E,
        1.0 if softcap is None else softcap * LOG2_E,
        v_scale,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        value_stride=v_NPGV.stride(1),
        group=batch.tile_heads,
        page=page,
        block_m=batch.block_m,
        block_n=block_n,
        block_d=block_d,
        tail_d=tail_d,
        block_v=block_v,
        chunk=chunk,
        has_softcap=softcap is not None,
        num_stages=2,
    )
    return out_THV
