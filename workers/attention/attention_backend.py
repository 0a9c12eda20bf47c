"""Defines the interface that attention backends offer to the models: attention over the paged cache.

When attention runs, this step's keys and values are already in the cache: kernels/decoder/rope_store.py writes them.
"""

# T tokens of the step · B sequences · H query heads · G KV heads · D head size · N KV blocks · P block size

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer, with the heads of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # Numbers of a query and of a key.
    scale: float  # Multiplies q.k before the softmax.
    window: int | None = None  # Tokens that a query sees, including its own. None means all.
    # A query sees only keys of its own chunk: position // chunk is equal for both. None means all keys.
    chunk: int | None = None
    softcap: float | None = None  # Bounds the scaled scores s by softcap * tanh(s / softcap), as in Gemma 2.
    has_sinks: bool = False  # Whether AttentionSpec.sinks has a logit for each head, as in gpt-oss.
    value_dim: int | None = None  # Numbers of a value and of the result's heads. None means head_dim.
    # A value is the first value_dim numbers of its key, in the same memory, as in latent attention.
    values_in_keys: bool = False
    cache_layer: int | None = None  # An earlier layer whose cache this one reads. None means a cache of its own.

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert not self.values_in_keys or (self.num_kv_heads == 1 and self.out_dim <= self.head_dim)

    @property
    def group_size(self) -> int:
        """Number of query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def out_dim(self) -> int:
        """Numbers of a value, and of each head of the result."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Number of KV heads, numbers of a key and numbers of a value: what a cache must fit."""
        return self.num_kv_heads, self.head_dim, self.out_dim

    @property
    def cached_dims(self) -> list[int]:
        """Numbers of each token and KV head in the cache's tensors: keys, then values unless they are in the keys."""
        return [self.head_dim] if self.values_in_keys else [self.head_dim, self.out_dim]

    @property
    def cached_numbers(self) -> int:
        """Numbers that the cache holds for each token."""
        return self.num_kv_heads * sum(self.cached_dims)

    @property
    def kind(self) -> LayerAttention:
        """Equal for layers that differ only in their caches. Such layers share plans and kernels."""
        return replace(self, cache_layer=None)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The settings that stay the same for the life of the engine."""

    layers: tuple[LayerAttention, ...]
    block_size: int  # Tokens of a KV block. A block's number is the same in every layer's cache.
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the caches: dtype, or float8_e4m3fn
    device: torch.device
    # By layer: each head's sink, [H] of any float dtype. It is a logit in the softmax's denominator that belongs to no
    # key. Backends read it at each step, so a parameter may be loaded later.
    sinks: Mapping[int, Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        assert set(self.sinks) == {i for i, layer in enumerate(self.layers) if layer.has_sinks}
        for i, layer in enumerate(self.layers):
            if layer.has_sinks:
                assert self.sinks[i].shape == (layer.num_heads,), (i, self.sinks[i].shape)
            if layer.cache_layer is not None:
                assert 0 <= layer.cache_layer < i, f"layer {i} cannot read the cache of layer {layer.cache_layer}"
                source = self.layers[layer.cache_layer]
                assert source.cache_layer is None, f"layer {layer.cache_layer} has no cache that layer {i} could read"
                assert source.kv_shape == layer.kv_shape, (i, source.kv_shape, layer.kv_shape)
                assert source.values_in_keys == layer.values_in_keys, i

    @property
    def kinds(self) -> tuple[LayerAttention, ...]:
        """The distinct kinds of layers, in the order of the first layer of each."""
        return tuple(dict.fromkeys(layer.kind for layer in self.layers))

    @property
    def kind_of_layer(self) -> list[int]:
        """Each layer's index in `kinds`."""
        index = {kind: i for i, kind in enumerate(self.kinds)}
        return [index[layer.kind] for layer in self.layers]

    def of_layers(self, chosen: Sequence[int]) -> AttentionSpec:
        """Returns the spec of a backend that computes some layers only. The caller passes it the caches they read."""
        return replace(
            self,
            layers=tuple(self.layers[i].kind for i in chosen),
            sinks={place: self.sinks[i] for place, i in enumerate(chosen) if i in self.sinks},
        )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step, in the order of their tokens. Decodes at the front may be computed separately."""

    query_lens: list[int]  # tokens that each sequence computes now (1 for a decode); they sum to T
    # Tokens in the cache once this step's are written. Query token i of sequence b is at position
    # context_lens[b] - query_lens[b] + i.
    context_lens: list[int]
    # Each sequence's KV blocks in order (SequenceBlocks.table), perhaps more than its context fills.
    block_tables: Sequence[Sequence[int]]
    most_shorter: int = 0  # Tokens by which a sequence may turn out to be shorter, see ShortensSequences.


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """The cache of one layer, or of several that read the same keys. Two objects are never equal.

    A cache of float8_e4m3fn holds keys / k_scale and values / v_scale.
    """

    k_NPGD: Tensor
    v_NPGD: Tensor  # D is LayerAttention.out_dim here. A view of the keys if values_in_keys.
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of captured steps in which sequences have drafts."""

    most: int  # Largest number of rows of one sequence.
    total: int  # Rows of a step, including those at its end that belong to no sequence.


class ShortensSequences(Protocol):
    """The backends of captured steps with drafts can take in lengths that only the device knows."""

    def shorten(self, short_B: Tensor) -> None:
        """Makes the first sequences of the planned step shorter, by AttentionBatch.most_shorter tokens at most. It is
        queued and waits for nothing. short_B is int64, on the device."""
        ...


class AttentionBackend(Protocol):
    """Computes attention for all layers. plan() runs once per step, and attend() once per layer.

    A backend is created once, from an AttentionSpec and one KVCache per layer. Layers that share a cache have the same
    object.
    """

    def plan(self, batch: AttentionBatch) -> None: ...

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> AttentionBackend | None:
        """Returns a backend for captured decode steps, or None if there is none of this kind.

        Its steps have exactly num_seqs sequences of at most max_context tokens. Its plan() writes to fixed memory.

        Args:
            drafts: None if each sequence has one row. Otherwise a sequence has any number up to drafts.most, or none.
                Results of rows that belong to no sequence are arbitrary numbers, but neither infinite nor NaN.
        """
        ...

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        """Returns causal attention [T, H, D] in q's dtype over the layer's cache, this step's tokens included.

        H and D are the layer's; the result's D is LayerAttention.out_dim. The result is written to out_THD if that is
        given.
        """
        ...
