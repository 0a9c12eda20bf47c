"""Has captured decodes of many sequences, and those with drafts, computed by the project's own kernels, and everything
else by FlashInfer.

Many sequences keep the GPU busy without a division of their keys. FlashInfer's wrapper divides them all the same, and
merges the parts in a second launch. With fewer sequences it is better balanced than our kernels.
Measured on an H100 (D=128, 32 heads, 8 KV heads, block 16, bf16; benchmarks/decode_attention.py), time of our kernels
relative to FlashInfer's:
- 576 tokens: +14 % for 32 sequences, -3 % for 64, -5 % for 128, 192, 256 and 512
- 2048 tokens: +9 % for 64, +1.5 % for 128, -1.4 % for 256; 8192 tokens: +8 % for 64
With 2 or 4 KV heads it takes more sequences: programs are sequences times KV heads.
"""

# T tokens of the step · H query heads · D head size

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)

if TYPE_CHECKING:
    from lorafleet.workers.attention.triton_decodes import CapturedDecodes

log = logging.getLogger(__name__)

CAPABILITY = (9, 0)  # the only one that is measured
HEAD_DIM = 128
MOST_GROUP = 8  # query heads of a KV head
LEAST_PROGRAMS = 1536  # sequences times KV heads of a captured step from which our kernels are faster


def with_own_decodes(backend: AttentionBackend, spec: AttentionSpec, caches: list[KVCache]) -> OwnDecodes:
    """Returns FlashInfer's backend with our captured decodes: those with drafts, for which FlashInfer has none, and
    others where ours are known to be faster."""
    least_seqs = None
    if _are_measured(spec):
        least_seqs = least_own_seqs(spec, torch.cuda.get_device_capability(spec.device))
    if least_seqs is not None:
        log.info("attention of captured decodes: Triton from %d sequences on", least_seqs)
    return OwnDecodes(backend, spec, caches, least_seqs)


def least_own_seqs(spec: AttentionSpec, capability: tuple[int, int]) -> int | None:
    """Returns the number of sequences from which our captured decodes are faster on a GPU of this compute capability,
    or None if they are not known to be."""
    if not _are_measured(spec) or capability != CAPABILITY:
        return None
    return -(-LEAST_PROGRAMS // min(kind.num_kv_heads for kind in spec.kinds))


def _are_measured(spec: AttentionSpec) -> bool:
    return all(_is_measured(kind) for kind in spec.kinds) and spec.kv_dtype == spec.dtype


def _is_measured(layer: LayerAttention) -> bool:
    is_plain = layer.window is None and layer.softcap is None
    return is_plain and layer.head_dim == HEAD_DIM and layer.group_size <= MOST_GROUP


class OwnDecodes:
    """Computes what the backend computes, except captured decodes with drafts, or of at least least_seqs sequences if
    that is not None."""

    def __init__(
        self, backend: AttentionBackend, spec: AttentionSpec, caches: list[KVCache], least_seqs: int | None
    ) -> None:
        self.least_seqs = least_seqs
        self._backend = backend
        self._spec = spec
        self._caches = caches
        self._captured: CapturedDecodes | None = None  # None until a graph needs them, since they take memory

    def plan(self, batch: AttentionBatch) -> None:
        self._backend.plan(batch)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> AttentionBackend | None:
        is_own = drafts is not None or (self.least_seqs is not None and num_seqs >= self.least_seqs)
        if not is_own:
            return self._backend.for_graph(num_seqs, max_context)
        if self._captured is None:
            from lorafleet.workers.attention.triton_decodes import CapturedDecodes, DecodeLayers  # optional on a CPU

            self._captured = CapturedDecodes(DecodeLayers.of(self._spec, self._caches))
        return self._captured.for_graph(num_seqs, max_context, drafts)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        return self._backend.attend(layer, q_THD, out_THD)
