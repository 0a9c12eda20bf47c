"""Computes paged attention with the project's own Triton kernel, kernels/decoder/paged_attention.py.

It serves any CUDA GPU, dtype and head size.
"""

# T tokens of the step · H query heads · D head size

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.decoder.paged_attention import PagedBatch, paged_attention
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache


class TritonAttention:
    def __init__(self, spec: AttentionSpec, caches: list[KVCache]) -> None:
        assert len(caches) == len(spec.sliding_windows)
        self._spec = spec
        self._caches = caches
        self._paged: PagedBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        spec = self._spec
        self._paged = PagedBatch.build(
            batch.query_lens,
            batch.context_lens,
            batch.block_tables,
            spec.block_size,
            spec.num_heads // spec.num_kv_heads,
            spec.dtype,
            spec.device,
        )

    def for_graph(self, num_seqs: int, max_context: int) -> None:  # noqa: ARG002  there is none
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        assert self._paged is not None, "plan() comes first"
        cache = self._caches[layer]
        window = self._spec.sliding_windows[layer]
        scales = cache.k_scale, cache.v_scale
        attended_THD = paged_attention(
            q_THD, cache.k_NPGD, cache.v_NPGD, self._paged, self._spec.scale, window, *scales, self._spec.softcap
        )
        return attended_THD if out_THD is None else out_THD.copy_(attended_THD)
