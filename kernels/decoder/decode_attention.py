"""Attention of decodes and their drafts over a paged KV cache with the project's own Triton kernels,
decode_attention_triton.py: the shapes of the launches, which captured steps may contain. The torch twin is
TorchAttention."""

# T rows, one of each sequence unless there are drafts · B sequences · H query heads · G KV heads
# D numbers of a query or key · V of a value, usually D · N KV blocks · P block size · S spans · M merges

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lorafleet.kernels.decoder.decode_attention_triton import decode_kernel, merge_kernel
from lorafleet.kernels.decoder.head_tiles import LEAST_ROWS, heads_of_tile, is_wide, parts_of_head, values_like_keys
from lorafleet.kernels.decoder.key_spans import SpanRule
from lorafleet.kernels.linear.linear_tuning import may_start_early
from lorafleet.kernels.linear.split_sums_triton import early_launch

SMS = 132  # of an H200; other GPUs get the same spans, and so the same results
PROGRAMS = 4 * SMS  # programs that fill the GPU
WIDE_PROGRAMS, WIDEST_PROGRAMS = 2 * SMS, SMS  # the same for wide heads, by the room that their tiles leave on an SM
MOST_HEADS = 64  # wide query heads in a tile, or rows of one with drafts: their result takes half of an SM's registers
SOME_HEADS = 32  # wide query heads of whose tiles two fit on an SM
KEY_BYTES = 16384  # bytes of one loop step's keys: 64 keys of 128 bf16 numbers
WIDE_KEYS = 32  # keys of a loop step if the values lie in them and are wide
LARGE_RESULT = 16 * 512  # numbers of a tile's result that 8 warps hold in registers better than 4
SHARED_ROWS = 64  # rows of a tile from which on tensor cores read keys and values from shared memory
MERGED_NUMBERS = 4096  # of partial results that a merge reads at a time
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The sizes of a layer's attention that decide how its launches look. Layers with equal shapes share kernels."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    values_in_keys: bool
    dtype: torch.dtype
    most_rows: int = 1  # Largest number of a sequence's rows: its last token and its drafts.

    @property
    def tile_heads(self) -> int:
        """Query heads of a KV head that share a program."""
        most, group = LEAST_ROWS if self.dtype is torch.float32 else MOST_HEADS, self.num_heads // self.num_kv_heads
        if self.most_rows == 1:
            return heads_of_tile(group, self._widest, most)
        return max(n for n in range(1, max(1, most // self.most_rows) + 1) if group % n == 0)

    @property
    def num_tiles(self) -> int:
        return self.num_heads // self.tile_heads

    def rule(self, window: int | None, chunk: int | None) -> SpanRule:
        """Returns how the keys of a layer with this window and chunk are divided."""
        programs = PROGRAMS
        if is_wide(self._widest):
            programs = WIDE_PROGRAMS if self.tile_heads <= SOME_HEADS else WIDEST_PROGRAMS
        return SpanRule.of(window, chunk, programs, self.num_tiles)

    def workspace_numbers(self, rule: SpanRule) -> int:
        """Returns how many float32 numbers the partial results take."""
        return rule.num_partial * self.most_rows * self.num_heads * (self.value_dim + 1)

    @property
    def _widest(self) -> int:
        return max(self.head_dim, self.value_dim)

    def constants(self) -> dict[str, int | bool]:
        """Returns the sizes of the tiles, as constants of decode_kernel."""
        block_d, tail_d = parts_of_head(self.head_dim)
        in_keys = self.values_in_keys and block_d >= self.value_dim
        block_v = block_d if in_keys else max(16, triton.next_power_of_2(self.value_dim))
        block_m = max(LEAST_ROWS, triton.next_power_of_2(self.tile_heads * self.most_rows))
        if block_m >= SHARED_ROWS and not in_keys:
            block_v = values_like_keys(block_v, block_d)
        block_n = KEY_BYTES // (max(block_d, block_v) * self.dtype.itemsize)
        if in_keys and self.dtype.itemsize == 2:
            block_n = max(WIDE_KEYS, block_n)
        return {
            "block_m": block_m,
            "block_n": min(64, max(16, block_n)),
            "block_d": block_d,
            "tail_d": tail_d,
            "block_v": block_v,
            "values_in_keys": in_keys,
            "stages": 5,  # Triton has two or three tiles of keys in flight then, since their addresses are loaded too.
            "num_warps": 8 if block_m * block_v >= LARGE_RESULT else 4,
        }


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One step's decodes in device memory. Captured launches read it, so that it may be rewritten in place."""

    spans_S5: Tensor  # int32, as SpanRule.divide returns them
    merges_M3: Tensor  # int32, as SpanRule.divide returns them
    blocks: Tensor  # int32, the blocks of all sequences in one row
    # int32: the first row of each sequence, the number of its rows, and its tokens. None if all have one row.
    rows_B3: Tensor | None = None


def decode_attention(
    q_THD: Tensor,
    k_NPGD: Tensor,
    v_NPGV: Tensor,
    batch: DecodeBatch,
    workspace: Tensor,
    shape: DecodeShape,
    out_THV: Tensor,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
) -> None:
    """Writes the attention of each sequence's last token over the keys of its spans to out, in q's dtype, and that of
    its last shape.most_rows tokens at most if batch.rows_B3 says so. Rows of no sequence are not written.

    The tokens' own keys are in the cache. Nothing here depends on the lengths of the sequences, and nothing waits.

    Args:
        workspace: float32, of DecodeShape.workspace_numbers at least. Only one launch may use it at a time.
        k_scale, v_scale: Factors of the caches' numbers.
        softcap: Bound of the scores, see LayerAttention.
        sinks_H: Each head's logit that is added to the softmax's denominator, of any float dtype.
        window, chunk: As in LayerAttention. Without rows_B3, the spans have what the tokens see, so neither matters.
    """
    heads, value_dim = shape.num_heads, shape.value_dim
    page, kv_heads = k_NPGD.shape[1:3]
    assert q_THD.shape[1:] == (heads, shape.head_dim) and q_THD.dtype == shape.dtype
    assert q_THD.stride()[1:] == (shape.head_dim, 1)
    assert out_THV.shape == (len(q_THD), heads, value_dim) and out_THV.is_contiguous()
    rows_B3, most_rows = batch.rows_B3, shape.most_rows
    assert (rows_B3 is None) == (most_rows == 1)
    num_seqs = len(q_THD) if rows_B3 is None else len(rows_B3)
    assert kv_heads == shape.num_kv_heads and k_NPGD.shape[3] == shape.head_dim and k_NPGD.is_contiguous()
    assert v_NPGV.shape == (*k_NPGD.shape[:3], value_dim)
    assert v_NPGV.is_contiguous() or (kv_heads == 1 and v_NPGV.stride() == k_NPGD.stride())
    assert sinks_H is None or (sinks_H.shape == (heads,) and sinks_H.is_contiguous())
    num_partial = 2 * (len(batch.spans_S5) - num_seqs)
    num_numbers = num_partial * most_rows * heads * value_dim
    assert len(workspace) >= num_numbers + num_partial * most_rows * heads
    partial, sums = workspace[:num_numbers], workspace[num_numbers:]
    constants = shape.constants()
    decode_kernel[(shape.num_tiles, len(batch.spans_S5))](
        q_THD,
        k_NPGD,
        v_NPGV,
        out_THV,
        partial,
        sums,
        batch.spans_S5,
        batch.blocks,
        rows_B3,
        sinks_H,
        q_THD.stride(0),
        scale * k_scale * LOG2_E,
        1.0 if softcap is None else softcap * LOG2_E,
        v_scale,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        value_dim=value_dim,
        value_stride=v_NPGV.stride(1),
        group=shape.tile_heads,
        page=page,
        has_softcap=softcap is not None,
        most_rows=most_rows,
        window=0 if window is None or most_rows == 1 else window,
        chunk=0 if chunk is None or most_rows == 1 else chunk,
        **constants,
    )
    if num_partial == 0:
        return
    block_v, early = max(16, triton.next_power_of_2(value_dim)), may_start_early(q_THD.device)
    num_merges = len(batch.merges_M3)
    merge_kernel[(heads, max(1, num_merges // most_rows), most_rows)](
        partial,
        sums,
        out_THV,
        batch.merges_M3,
        rows_B3,
        sinks_H,
        num_merges,
        heads=heads,
        value_dim=value_dim,
        block_v=block_v,
        block_s=max(1, min(32, MERGED_NUMBERS // block_v)),
        most_rows=most_rows,
        early=early,
        num_warps=4,
        **early_launch(early),
    )
