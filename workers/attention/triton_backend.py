"""Computes paged attention with the project's own Triton kernels. It serves any CUDA GPU, dtype and head size.

Decodes at the front of a step have kernels of their own (triton_decodes.py), which captured graphs may contain. The
other sequences are computed by paged_backend.py. Triton compiles the kernels at first use, in a second or two each. On
a GPU the constructor does that, so that no request waits for it.
"""

# T tokens of the step · H query heads · D head size

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, DraftRows, KVCache
from lorafleet.workers.attention.paged_backend import PagedAttention
from lorafleet.workers.attention.triton_decodes import CapturedDecodes, DecodeLayers, TritonDecodes


class TritonAttention:
    def __init__(self, spec: AttentionSpec, caches: list[KVCache]) -> None:
        assert len(caches) == len(spec.layers)
        self._spec = spec
        self._caches = caches
        self._prompts = PagedAttention(spec, caches)
        layers = DecodeLayers.of(spec, caches)
        self._decodes = TritonDecodes(layers)
        self._captured = CapturedDecodes(layers)
        self._num_decodes = 0
        self._has_prompts = False
        if spec.device.type == "cuda":
            self._compile()

    def plan(self, batch: AttentionBatch) -> None:
        lens, contexts, tables = batch.query_lens, batch.context_lens, batch.block_tables
        self._num_decodes = count = next((i for i, length in enumerate(lens) if length > 1), len(lens))
        if count > 0:
            self._decodes.plan(AttentionBatch(lens[:count], contexts[:count], tables[:count]))
        self._has_prompts = count < len(lens)
        if self._has_prompts:
            self._prompts.plan(AttentionBatch(lens[count:], contexts[count:], tables[count:]))

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> TritonDecodes:
        return self._captured.for_graph(num_seqs, max_context, drafts)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        own, count = self._spec.layers[layer], self._num_decodes
        if out_THD is None:
            out_THD = q_THD.new_empty(*q_THD.shape[:2], own.out_dim)
        if count > 0:
            self._decodes.attend(layer, q_THD[:count], out_THD[:count])
        if self._has_prompts:
            self._prompts.attend(layer, q_THD[count:], out_THD[count:])
        return out_THD

    def _compile(self) -> None:
        """Runs every variant of the kernels once over block 0, whatever lies there: a decode and a prompt."""
        spec = self._spec
        first_layers = [spec.kind_of_layer.index(kind) for kind in range(len(spec.kinds))]
        for tokens in (1, 2):
            self.plan(AttentionBatch([tokens], [tokens], [[0]]))
            for i in first_layers:
                layer = spec.layers[i]
                q_THD = torch.zeros(tokens, layer.num_heads, layer.head_dim, dtype=spec.dtype, device=spec.device)
                self.attend(i, q_THD)
