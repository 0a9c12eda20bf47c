"""Paged attention by the project's own Triton kernel, kernels/paged_attention.py: any CUDA GPU, dtype and head size."""

# T tokens of the step · H query heads · G KV heads · D head size

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.paged_attention import PagedBatch, paged_attention
from lorafleet.workers.attention.base import AttentionBatch, AttentionSpec, KVCache


class TritonAttention:
    def __init__(self, spec: AttentionSpec, caches: list[KVCache]) -> None:
        assert len(caches) == len(spec.sliding_windows)
        self._spec = spec
        self._caches = caches
        self._step: tuple[PagedBatch, Tensor] | None = None

    def plan(self, batch: AttentionBatch) -> None:
        spec = self._spec
        paged = PagedBatch.build(
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            spec.block_size,
            spec.num_heads // spec.num_kv_heads,
            spec.dtype,
            spec.device,
        )
        self._step = (paged, batch.slot_mapping_T)

    def attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        assert self._step is not None, "plan() comes first"
        paged, slot_mapping_T = self._step
        cache = self._caches[layer]
        cache.write(k_TGD, v_TGD, slot_mapping_T)
        window = self._spec.sliding_windows[layer]
        return paged_attention(q_THD, cache.k_NPGD, cache.v_NPGD, paged, self._spec.scale, window)
