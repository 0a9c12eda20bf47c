"""Computes steps of decodes with kernels/decoder/decode_attention.py, in captured graphs and without. Captured ones may
have drafts.

The host divides the keys of a step among programs, and copies that and the block numbers to the device at once. The
shapes of the launches depend on the number of sequences alone, so a captured step serves any lengths.
"""

# T rows: B sequences and their drafts · H query heads · D head size

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.decoder.decode_attention import DecodeBatch, DecodeShape, decode_attention
from lorafleet.kernels.decoder.key_spans import SpanRule
from lorafleet.workers.attention.attention_backend import (
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.kv_pages import join_blocks, pinned_copy, running_sums

ROW_FIELDS = 3  # of a sequence in DecodeBatch.rows_B3


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
    def of(cls, spec: AttentionSpec, caches: list[KVCache], most_rows: int = 1) -> DecodeLayers:
        """Allocates the workspace on the spec's device. `most_rows` is the largest number of a sequence's rows."""
        shapes = [_shape(spec, layer, most_rows) for layer in spec.layers]
        by_layer = [shape.rule(layer.window, layer.chunk) for shape, layer in zip(shapes, spec.layers, strict=True)]
        rules = list(dict.fromkeys(by_layer))
        size = max(shape.workspace_numbers(rule) for shape, rule in zip(shapes, by_layer, strict=True))
        workspace = torch.empty(size, dtype=torch.float32, device=spec.device)
        return cls(spec, caches, shapes, rules, [rules.index(rule) for rule in by_layer], workspace)

    @property
    def has_drafts(self) -> bool:
        """Whether sequences may have drafts, so that a plan says how many rows each has."""
        return self.shapes[0].most_rows > 1

    def plan_size(self, num_seqs: int) -> int:
        """Returns the int32 numbers of a plan before its blocks."""
        size = sum(rows * fields for rule in self.rules for rows, fields in rule.shapes(num_seqs))
        return size + ROW_FIELDS * num_seqs if self.has_drafts else size

    def packed(self, batch: AttentionBatch) -> Tensor:
        """Returns a step's plan in pinned memory: the spans and merges of each rule, the rows of each sequence if it
        may have drafts, then all blocks."""
        lens_B = np.array(batch.context_lens, dtype=np.int32)
        counts_B = -(-lens_B // self.spec.block_size)
        blocks = join_blocks(batch.block_tables, counts_B.tolist())
        first_block_B = running_sums(counts_B)[:-1]
        rows_B = np.array(batch.query_lens, dtype=np.int32) if self.has_drafts else None
        # A shorter sequence sees the keys before as well.
        seen_B = None if rows_B is None else rows_B + batch.most_shorter
        divided = [part.ravel() for rule in self.rules for part in rule.divide(lens_B, first_block_B, seen_B)]
        if rows_B is not None:
            divided.append(np.stack((running_sums(rows_B)[:-1], rows_B, lens_B), axis=1).ravel())
        return pinned_copy(np.concatenate((*divided, blocks)))

    def batches(self, memory: Tensor, num_seqs: int) -> list[DecodeBatch]:
        """Returns views of a plan in device memory, one for each rule."""
        shapes = [shape for rule in self.rules for shape in rule.shapes(num_seqs)]
        if self.has_drafts:
            shapes.append((num_seqs, ROW_FIELDS))
        ends = list(accumulate(rows * fields for rows, fields in shapes))
        starts = [0, *ends[:-1]]
        parts = [memory[i:k].view(shape) for i, k, shape in zip(starts, ends, shapes, strict=True)]
        rows_B3 = parts.pop() if self.has_drafts else None
        blocks = memory[ends[-1] :]
        divided = zip(parts[::2], parts[1::2], strict=True)
        return [DecodeBatch(spans, merges, blocks, rows_B3) for spans, merges in divided]


class CapturedDecodes:
    """Makes backends for captured steps. They share their plan's memory, since only one graph runs at a time."""

    def __init__(self, layers: DecodeLayers) -> None:
        spec = layers.spec
        self._layers = {1: layers}  # By the largest number of a sequence's rows.
        self._memory = torch.zeros(0, dtype=torch.int32, device=spec.device)
        self._attended = torch.zeros(0, dtype=spec.dtype, device=spec.device)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> TritonDecodes:
        """Returns what AttentionBackend.for_graph does."""
        layers, spec = self._layers[1], self._layers[1].spec
        if drafts is not None:
            if drafts.most not in self._layers:
                self._layers[drafts.most] = DecodeLayers.of(spec, layers.caches, drafts.most)
            layers = self._layers[drafts.most]
            most_numbers = drafts.total * max(layer.num_heads * layer.out_dim for layer in spec.layers)
            if len(self._attended) < most_numbers:
                self._attended = torch.zeros(most_numbers, dtype=spec.dtype, device=spec.device)
        # Sequences that share a prefix list its blocks more than once, so the cache's size is no bound.
        size = layers.plan_size(num_seqs) + num_seqs * -(-max_context // spec.block_size)
        if len(self._memory) < size:
            self._memory = torch.zeros(size, dtype=torch.int32, device=spec.device)
        return TritonDecodes(layers, (self._memory, num_seqs), None if drafts is None else self._attended)


class TritonDecodes:
    """Computes steps in which every sequence computes one token, or as many as `layers` says.

    Args:
        fixed: int32 memory that captured kernels read and that plan() rewrites, with the number of sequences that each
            step has. None makes new memory for each step.
        attended: Memory of any layer's results, which begins with zeros. So rows that belong to no sequence have the
            results of earlier steps. None if there are no such rows.
    """

    def __init__(
        self, layers: DecodeLayers, fixed: tuple[Tensor, int] | None = None, attended: Tensor | None = None
    ) -> None:
        self._layers = layers
        self._attended = attended
        self._memory = None if fixed is None else fixed[0]
        self._batches = [] if fixed is None else layers.batches(*fixed)

    def plan(self, batch: AttentionBatch) -> None:
        assert max(batch.query_lens) <= self._layers.shapes[0].most_rows
        packed = self._layers.packed(batch)
        if self._memory is None:
            memory = packed.to(self._layers.spec.device, non_blocking=True)
            self._batches = self._layers.batches(memory, len(batch.query_lens))
        else:
            self._memory[: len(packed)].copy_(packed, non_blocking=True)

    def shorten(self, short_B: Tensor) -> None:
        """Does what ShortensSequences.shorten does. Keys behind a row's own are read by no row."""
        rows_B3 = self._batches[0].rows_B3
        assert rows_B3 is not None, "only steps with drafts tell the kernels how long sequences are"
        rows_B3[: len(short_B), 2] -= short_B.to(torch.int32)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> None:  # noqa: ARG002  CapturedDecodes makes them
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        assert self._batches, "plan() comes first"
        layers = self._layers
        own, cache = layers.spec.layers[layer], layers.caches[layer]
        shape = *q_THD.shape[:2], own.out_dim
        if out_THD is None and self._attended is not None:
            out_THD = self._attended[: math.prod(shape)].view(shape)
        elif out_THD is None:
            out_THD = q_THD.new_empty(shape)
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
            own.window,
            own.chunk,
        )
        return out_THD


def _shape(spec: AttentionSpec, layer: LayerAttention, most_rows: int) -> DecodeShape:
    sizes = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.out_dim
    return DecodeShape(*sizes, layer.values_in_keys, spec.dtype, most_rows)
