"""Describes each layer's attention to the backends and to the KV cache, from the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import AttentionSpec, LayerAttention
from lorafleet.workers.bases.layer_config import LatentAttentionConfig
from lorafleet.workers.bases.served_config import ServedConfig


def layer_attention(config: ServedConfig, index: int) -> LayerAttention:
    """Returns the attention of one of the layers that have it. `config` has the heads of this rank, as Shard.local
    does."""
    attention = config.attentions[index]
    if isinstance(attention, LatentAttentionConfig):
        return LayerAttention(
            num_heads=attention.num_heads,
            num_kv_heads=1,
            head_dim=attention.cached_dim,
            scale=attention.scale,
            value_dim=attention.latent_dim,
            values_in_keys=True,
        )
    source = attention.cache_layer
    return LayerAttention(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        window=attention.window,
        chunk=attention.chunk,
        softcap=attention.softcap,
        has_sinks=attention.has_sinks,
        cache_layer=None if source is None else config.attention_layers.index(source),
    )


def attention_spec(
    config: ServedConfig,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    sinks: Mapping[int, Tensor],
) -> AttentionSpec:
    """Returns the spec of all layers that have attention. `config` is as in layer_attention, and `sinks` as in
    AttentionSpec."""
    return AttentionSpec(
        layers=tuple(layer_attention(config, index) for index in range(len(config.attentions))),
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        sinks=sinks,
    )
