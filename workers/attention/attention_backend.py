"""What every attention backend offers to the models: attention over the paged cache.

This step's keys and values are in the cache by then: kernels/decoder/rope_store.py writes them.
"""

# T tokens of the step · B sequences · H query heads · G KV heads · D head size · N KV blocks · P block size

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What stays the same for the life of the engine.

    sliding_windows: for each layer, how many tokens a query sees counting its own; None is all of them.
    scale: multiplies q.k before the softmax. kv_dtype: what the caches hold: dtype, or float8_e4m3fn. softcap: bounds
    the scaled scores s by softcap * tanh(s / softcap), as Gemma 2 does; None does not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_windows: tuple[int | None, ...]
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step, in the order of their tokens. Decodes that stand first may be computed apart.

    query_lens: tokens each sequence computes now (1 for a decode); they sum to T. context_lens: tokens in the cache
    once this step's are written, so a query token i of sequence b stands at context_lens[b] - query_lens[b] + i.
    block_tables: each sequence's KV blocks in order, perhaps with more than its context fills; SequenceBlocks.table.
    """

    query_lens: list[int]
    context_lens: list[int]
    block_tables: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache: two tensors [N, P, G, D]. A cache of float8_e4m3fn holds keys / k_scale, values / v_scale."""

    k_NPGD: Tensor
    v_NPGD: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


class AttentionBackend(Protocol):
    """Made once with (AttentionSpec, one KVCache a layer). plan() runs once a step, attend() once a layer."""

    def plan(self, batch: AttentionBatch) -> None: ...

    def for_graph(self, num_seqs: int, max_context: int) -> AttentionBackend | None:
        """A backend for captured decode steps of just num_seqs sequences of at most max_context tokens, whose plan()
        writes to fixed memory; None where this kind has none."""
        ...

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        """Causal attention [T, H, D] in q's dtype over the layer's cache, which holds this step's tokens already.

        out_THD: where to put it, where its place matters.
        """
        ...
