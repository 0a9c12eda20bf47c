"""Defines the interface that attention backends offer to the models: attention over the paged cache.

When attention runs, this step's keys and values are already in the cache: kernels/decoder/rope_store.py writes them.
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
    """The settings that stay the same for the life of the engine."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k before the softmax
    sliding_windows: tuple[int | None, ...]  # by layer, tokens that a query sees, including its own; None means all
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the caches: dtype, or float8_e4m3fn
    device: torch.device
    softcap: float | None = None  # bounds the scaled scores s by softcap * tanh(s / softcap), as in Gemma 2


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step, in the order of their tokens. Decodes at the front may be computed separately."""

    query_lens: list[int]  # tokens that each sequence computes now (1 for a decode); they sum to T
    # Tokens in the cache once this step's are written. Query token i of sequence b is at position
    # context_lens[b] - query_lens[b] + i.
    context_lens: list[int]
    # Each sequence's KV blocks in order (SequenceBlocks.table), perhaps more than its context fills.
    block_tables: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache, which is two tensors [N, P, G, D].

    A cache of float8_e4m3fn holds keys / k_scale and values / v_scale.
    """

    k_NPGD: Tensor
    v_NPGD: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


class AttentionBackend(Protocol):
    """Computes attention for all layers. plan() runs once per step, and attend() once per layer.

    A backend is created once, from an AttentionSpec and one KVCache per layer.
    """

    def plan(self, batch: AttentionBatch) -> None: ...

    def for_graph(self, num_seqs: int, max_context: int) -> AttentionBackend | None:
        """Returns a backend for captured decode steps, or None if there is none of this kind.

        Its steps have exactly num_seqs sequences of at most max_context tokens. Its plan() writes to fixed memory.
        """
        ...

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        """Returns causal attention [T, H, D] in q's dtype over the layer's cache, this step's tokens included.

        The result is written to out_THD if that is given.
        """
        ...
