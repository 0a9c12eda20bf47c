"""Computes paged attention with one Triton kernel, kernels/decoder/paged_attention.py, for every kind of sequence.

Each query walks all of its keys in blocks that begin at multiples of their size, whatever is computed beside it. So its
bits are the same in a prompt, in any chunk of it and in a decode. triton_backend.py uses it for prompts alone, unless
this is asked for (--batch-invariant), since it is slower for decodes: it does not divide long contexts among programs.
"""

# T tokens of the step · B sequences · H query heads · D head size · L longest block table

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.decoder.paged_attention import PagedBatch, paged_attention, tile_shape
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, DraftRows, KVCache
from lorafleet.workers.attention.kv_pages import pinned_copy


class PagedAttention:
    def __init__(self, spec: AttentionSpec, caches: list[KVCache]) -> None:
        assert len(caches) == len(spec.layers)
        self._spec = spec
        self._caches = caches
        # The shapes that tiles depend on: query heads of a KV head, and the larger head size.
        shapes = [(layer.group_size, max(layer.head_dim, layer.out_dim)) for layer in spec.layers]
        self.shapes = list(dict.fromkeys(shapes))
        self._shape_of_layer = [self.shapes.index(shape) for shape in shapes]
        self._batches: list[PagedBatch] = []  # one of each of the shapes

    def plan(self, batch: AttentionBatch) -> None:
        spec, sequences = self._spec, (batch.query_lens, batch.context_lens, batch.block_tables)
        self._batches = [
            PagedBatch.build(*sequences, spec.block_size, *shape, spec.dtype, spec.device) for shape in self.shapes
        ]

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> PagedDecodes | None:
        if drafts is not None:
            return None
        return PagedDecodes(self._spec, self._caches, num_seqs, max_context)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        own, cache = self._spec.layers[layer], self._caches[layer]
        return paged_attention(
            q_THD,
            cache.k_NPGD,
            cache.v_NPGD,
            self._batches[self._shape_of_layer[layer]],
            own.scale,
            own.window,
            cache.k_scale,
            cache.v_scale,
            own.softcap,
            own.chunk,
            self._spec.sinks.get(layer),
            out_THD,
        )


class PagedDecodes(PagedAttention):
    """Computes steps of exactly num_seqs decodes of at most max_context tokens, in memory that never moves."""

    def __init__(self, spec: AttentionSpec, caches: list[KVCache], num_seqs: int, max_context: int) -> None:
        super().__init__(spec, caches)
        device = spec.device
        self._context_B = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        width = -(-max_context // spec.block_size)
        self._tables_BL = torch.zeros((num_seqs, width), dtype=torch.int32, device=device)
        starts_B = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        tiles_K2 = torch.stack((starts_B[:-1], torch.zeros_like(starts_B[:-1])), dim=1).contiguous()
        self._batches = [
            PagedBatch(num_seqs, *tile_shape(*shape, spec.dtype), tiles_K2, starts_B, self._context_B, self._tables_BL)
            for shape in self.shapes
        ]

    def plan(self, batch: AttentionBatch) -> None:
        num_seqs = len(batch.context_lens)
        assert num_seqs == len(self._context_B) and max(batch.query_lens) == 1
        counts = [-(-length // self._spec.block_size) for length in batch.context_lens]
        tables = np.zeros((num_seqs, max(counts)), dtype=np.int32)
        for table_L, used, count in zip(tables, batch.block_tables, counts, strict=True):
            table_L[:count] = used[:count]
        lens_B = pinned_copy(np.array(batch.context_lens, dtype=np.int32))
        self._context_B.copy_(lens_B, non_blocking=True)
        host_BL = pinned_copy(tables.ravel()).view(tables.shape)
        self._tables_BL[:, : tables.shape[1]].copy_(host_BL, non_blocking=True)
