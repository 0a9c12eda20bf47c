"""Computes prompts whose long contexts are divided among programs, with FlashInfer's FA3, which does not divide keys.

The keys in front of a chunk are seen by all of its queries. So each part of them is a sequence of its own for FA3,
without a causal mask. The chunk's own keys are computed as usual, and merge_parts adds the parts. prompt_tiles.py says
into how many parts contexts are divided.
"""

# T tokens of the prompts · N tokens with long contexts · S parts · H query heads · D head size

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.decoder.merge_parts import merge_parts
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.flashinfer_calls import PlacedPrompts, plan_prompts, run_layer
from lorafleet.workers.attention.kv_pages import pinned_copy
from lorafleet.workers.attention.prompt_tiles import LONG_CONTEXT, MOST_PART_QUERIES

FA3_CAPABILITY = (9, 0)


def may_divide(spec: AttentionSpec, layer: LayerAttention, capability: tuple[int, int]) -> bool:
    """Returns whether FA3 computes prompts of these layers on a GPU of this compute capability, and they see all
    keys."""
    return capability == FA3_CAPABILITY and spec.kv_dtype == spec.dtype and layer.window is None


@dataclass(frozen=True, slots=True)
class Division:
    """A step's prompts in parts."""

    parts: AttentionBatch  # Part by part, the prompts with long contexts. Each query sees all of its part's keys.
    ends: AttentionBatch  # All prompts. A long context begins behind the parts.
    rows: list[int]  # Rows of the tokens with long contexts, among those of all prompts.
    num_parts: int

    @classmethod
    def of(cls, batch: AttentionBatch, num_parts: int, block_size: int, long_context: int = LONG_CONTEXT) -> Division:
        """Divides the contexts in front of chunks that have at least long_context tokens, at the borders of blocks."""
        lens = list(zip(batch.query_lens, batch.context_lens, strict=True))
        blocks = [(end - count) // block_size if end - count >= long_context else 0 for count, end in lens]
        num_parts = min(num_parts, *(count for count in blocks if count))
        parts = AttentionBatch([], [], tables := [])
        for part in range(num_parts):
            for (queries, _), table, count in zip(lens, batch.block_tables, blocks, strict=True):
                if count:
                    begin, end = part * count // num_parts, (part + 1) * count // num_parts
                    parts.query_lens.append(queries)
                    parts.context_lens.append((end - begin) * block_size)
                    tables.append(table[begin:end])
        left = [end - count * block_size for (_, end), count in zip(lens, blocks, strict=True)]
        behind = [table[count:] if count else table for table, count in zip(batch.block_tables, blocks, strict=True)]
        starts = accumulate(batch.query_lens, initial=0)
        rows = [
            start + i for start, (n, _), count in zip(starts, lens, blocks, strict=False) if count for i in range(n)
        ]
        return cls(parts, AttentionBatch(batch.query_lens, left, behind), rows, num_parts)


class DividedPrompts:
    """Computes the prompts of layers of one kind. It needs FA3 and layers without windows."""

    def __init__(self, spec: AttentionSpec, layer: LayerAttention, workspace: Tensor) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._spec = spec
        self._layer = layer
        self._parts = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._ends = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._num_parts = 0
        self._row_N = torch.zeros(0, dtype=torch.int32, device=spec.device)
        self._row_of_parts = self._row_N  # [S * N]: the row of each query of the parts.
        # Allocated once, since the driver would stop a step that needs more memory than those before it.
        shape = MOST_PART_QUERIES, layer.num_heads, layer.head_dim
        self._queries, self._results = (torch.empty(shape, dtype=spec.dtype, device=spec.device) for _ in range(2))
        self._log_sums = torch.empty(shape[:2], dtype=torch.float32, device=spec.device)

    @staticmethod
    def num_bytes(spec: AttentionSpec, layer: LayerAttention) -> int:
        """Returns the bytes of the queries, results and sums that are allocated once."""
        return MOST_PART_QUERIES * layer.num_heads * (2 * layer.head_dim * spec.dtype.itemsize + 4)

    def plan(self, division: Division) -> None:
        spec = self._spec
        parts = PlacedPrompts.of(division.parts, spec.block_size, spec.device)
        ends = PlacedPrompts.of(division.ends, spec.block_size, spec.device)
        plan_prompts(self._parts, spec, self._layer, parts, causal=False)
        plan_prompts(self._ends, spec, self._layer, ends)
        self._num_parts = division.num_parts
        rows = np.tile(np.array(division.rows, dtype=np.int32), division.num_parts)
        self._row_of_parts = pinned_copy(rows).to(spec.device, non_blocking=True)
        self._row_N = self._row_of_parts[: len(division.rows)]

    def attend(self, q_THD: Tensor, cache: KVCache, out_THD: Tensor) -> None:
        count, shape = len(self._row_of_parts), (self._num_parts, len(self._row_N))
        q_parts, part_log_sums, results = self._queries[:count], self._log_sums[:count], self._results[:count]
        torch.index_select(q_THD, 0, self._row_of_parts, out=q_parts)
        log_sum_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        run_layer(self._parts, q_parts, cache, results, part_log_sums)
        run_layer(self._ends, q_THD, cache, out_THD, log_sum_TH)
        merge_parts(out_THD, log_sum_TH, results.unflatten(0, shape), part_log_sums.unflatten(0, shape), self._row_N)
