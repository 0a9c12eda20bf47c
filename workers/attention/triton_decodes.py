"""Computes steps of decodes with kernels/decoder/decode_attention.py, in captured graphs and without.

The host divides the keys of a step among programs, and copies that and the block numbers to the device at once. The
shapes of the launches depend on the number of sequences alone, so a captured step serves any lengths.
"""

# B sequences · H query heads · D head size

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.decoder.decode_attention import DecodeBatch, DecodeShape, decode_attention
from lorafleet.kernels.decoder.key_spans import SpanRule
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.kv_pages import join_blocks, pinned_copy, running_sums


@dataclass(frozen=True, slots=True)
class DecodeLayers:
    """The model's layers as the kernels see them. All graphs share them."""

    spec: AttentionSpec
    caches: list[KVCache]
    shapes: list[DecodeShape]  # One per layer.
    rules: list[SpanRule]  # The distinct rules.
    rule_of_layer: list[int]
    workspace: Tensor  # float32, for the partial results of any layer.

    @classmethod
    def of(cls, spec: AttentionSpec, caches: list[KVCache]) -> DecodeLayers:
        """Allocates the workspace on the spec's device."""
        shapes = [_shape(spec, layer) for layer in spec.layers]
        by_layer = [shape.rule(layer.window, layer.chunk) for shape, layer in zip(shapes, spec.layers, strict=True)]
        rules = list(dict.fromkeys(by_layer))
        size = max(shape.workspace_numbers(rule) for shape, rule in zip(shapes, by_layer, strict=True))
        workspace = torch.empty(size, dtype=torch.float32, device=spec.device)
        return cls(spec, caches, shapes, rules, [rules.index(rule) for rule in by_layer], workspace)

    def plan_size(self, num_seqs: int) -> int:
        """Returns the int32 numbers of a plan before its blocks."""
        return sum(rows * fields for rule in self.rules for rows, fields in rule.shapes(num_seqs))

    def packed(self, batch: AttentionBatch) -> Tensor:
        """Returns a step's plan in pinned memory: the spans and merges of each rule, then all blocks."""
        lens_B = np.array(batch.context_lens, dtype=np.int32)
        counts_B = -(-lens_B // self.spec.block_size)
        blocks = np.frombuffer(join_blocks(batch.block_tables, counts_B.tolist()), dtype=np.int32)
        first_block_B = running_sums(counts_B)[:-1]
        divided = [rows.ravel() for rule in self.rules for rows in rule.divide(lens_B, first_block_B)]
        return pinned_copy(np.concatenate((*divided, blocks)))

    def batches(self, memory: Tensor, num_seqs: int) -> list[DecodeBatch]:
        """Returns views of a plan in device memory, one for each rule."""
        shapes = [shape for rule in self.rules for shape in rule.shapes(num_seqs)]
        ends = list(accumulate(rows * fields for rows, fields in shapes))
        starts = [0, *ends[:-1]]
        parts = [memory[i:k].view(shape) for i, k, shape in zip(starts, ends, shapes, strict=True)]
        return [
            DecodeBatch(spans, merges, memory[ends[-1] :]) for spans, merges in zip(*[iter(parts)] * 2, strict=True)
        ]


class CapturedDecodes:
    """Makes backends for captured steps. They share their plan's memory, since only one graph runs at a time."""

    def __init__(self, layers: DecodeLayers) -> None:
        self._layers = layers
        self._memory = torch.zeros(0, dtype=torch.int32, device=layers.spec.device)

    def for_graph(self, num_seqs: int, max_context: int) -> TritonDecodes:
        """Returns what AttentionBackend.for_graph does."""
        spec = self._layers.spec
        # Sequences that share a prefix list its blocks more than once, so the cache's size is no bound.
        size = self._layers.plan_size(num_seqs) + num_seqs * -(-max_context // spec.block_size)
        if len(self._memory) < size:
            self._memory = torch.zeros(size, dtype=torch.int32, device=spec.device)
        return TritonDecodes(self._layers, (self._memory, num_seqs))


class TritonDecodes:
    """Computes steps in which every sequence computes one token.

    Args:
        fixed: int32 memory that captured kernels read and that plan() rewrites, with the number of sequences that each
            step has. None makes new memory for each step.
    """

    def __init__(self, layers: DecodeLayers, fixed: tuple[Tensor, int] | None = None) -> None:
        self._layers = layers
        self._memory = None if fixed is None else fixed[0]
        self._batches = [] if fixed is None else layers.batches(*fixed)

    def plan(self, batch: AttentionBatch) -> None:
        assert max(batch.query_lens) == 1
        packed = self._layers.packed(batch)
        if self._memory is None:
            memory = packed.to(self._layers.spec.device, non_blocking=True)
            self._batches = self._layers.batches(memory, len(batch.query_lens))
        else:
            self._memory[: len(packed)].copy_(packed, non_blocking=True)

    def for_graph(self, num_seqs: int, max_context: int) -> None:  # noqa: ARG002  CapturedDecodes makes them
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        assert self._batches, "plan() comes first"
        layers = self._layers
        own, cache = layers.spec.layers[layer], layers.caches[layer]
        if out_THD is None:
            out_THD = q_THD.new_empty(*q_THD.shape[:2], own.out_dim)
        decode_attention(
            q_THD,
            cache.k_NPGD,
            cache.v_NPGD,
            self._batches[layers.rule_of_layer[layer]],
            layers.workspace,
            layers.shapes[layer],
            out_THD,
            own.scale,
            cache.k_scale,
            cache.v_scale,
            own.softcap,
            layers.spec.sinks.get(layer),
        )
        return out_THD


def _shape(spec: AttentionSpec, layer: LayerAttention) -> DecodeShape:
    return DecodeShape(
        layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.out_dim, layer.values_in_keys, spec.dtype
    )
