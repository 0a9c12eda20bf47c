"""Has captured decodes of many sequences computed by the project's own kernels, and everything else by FlashInfer.

Steps of many sequences read their keys at the speed of the memory, with either kernel. FlashInfer's wrapper adds a
launch that merges parts of sequences.
"""

# T tokens of the step · H query heads · D head size

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    LayerAttention,
)

log = logging.getLogger(__name__)

CAPABILITY = (9, 0)  # the only one that is measured
HEAD_DIM = 128
MOST_GROUP = 8  # query heads of a KV head
LEAST_SEQS = 64  # sequences of a captured step from which our kernels are faster


def with_own_decodes(backend: AttentionBackend, spec: AttentionSpec, caches: list[KVCache]) -> AttentionBackend:
    """Returns FlashInfer's backend with our captured decodes, or as it is where they are not known to be faster."""
    if not all(_is_measured(kind) for kind in spec.kinds) or spec.kv_dtype != spec.dtype:
        return backend
    if torch.cuda.get_device_capability(spec.device) != CAPABILITY:
        return backend
    log.info("attention of captured decodes: Triton from %d sequences on", LEAST_SEQS)
    return OwnDecodes(backend, spec, caches)


def _is_measured(layer: LayerAttention) -> bool:
    is_plain = layer.window is None and layer.softcap is None
    return is_plain and layer.head_dim == HEAD_DIM and layer.group_size <= MOST_GROUP


class OwnDecodes:
    """Computes what the backend computes, except for captured decodes of LEAST_SEQS sequences or more."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, caches: list[KVCache]) -> None:
        from lorafleet.workers.attention.triton_decodes import CapturedDecodes, DecodeLayers  # optional on a CPU

        self._backend = backend
        self._captured = CapturedDecodes(DecodeLayers.of(spec, caches))

    def plan(self, batch: AttentionBatch) -> None:
        self._backend.plan(batch)

    def for_graph(self, num_seqs: int, max_context: int) -> AttentionBackend | None:
        if num_seqs >= LEAST_SEQS:
            return self._captured.for_graph(num_seqs, max_context)
        return self._backend.for_graph(num_seqs, max_context)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        return self._backend.attend(layer, q_THD, out_THD)
