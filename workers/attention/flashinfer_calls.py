"""Passes a step's sequences to FlashInfer's wrappers for prompts: their plans, and a layer's run."""

# T tokens of the prompts · B sequences · H query heads · D head size

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.kv_pages import KVPages, pinned_copy, running_sums


@dataclass(frozen=True, slots=True)
class PlacedPrompts:
    """Prompts, and where their keys are. All kinds of layers share them."""

    batch: AttentionBatch
    query_starts: Tensor  # [B + 1], int32 on the host: where each prompt's tokens begin.
    pages: KVPages  # On the host.
    blocks: Tensor  # Those of the pages, on the device.

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int, device: torch.device) -> PlacedPrompts:
        pages = KVPages.of(batch, block_size)
        query_starts = pinned_copy(running_sums(np.array(batch.query_lens)))
        return cls(batch, query_starts, pages, pages.blocks.to(device, non_blocking=True))


def plan_prompts(
    wrapper: Any, spec: AttentionSpec, layer: LayerAttention, placed: PlacedPrompts, *, causal: bool = True
) -> None:
    """Plans a BatchPrefillWithPagedKVCacheWrapper for layers of a kind. Without `causal`, each query sees all keys."""
    pages, batch = placed.pages, placed.batch
    wrapper.plan(
        placed.query_starts,
        pages.starts,
        placed.blocks,
        pages.last_lens,
        *shape_of(spec, layer),
        causal=causal,
        seq_lens=pages.lens,
        max_token_per_sequence=max(batch.query_lens),
        max_sequence_kv=max(batch.context_lens),
        **options_of(spec, layer),
    )


def run_layer(wrapper: Any, q_THD: Tensor, cache: KVCache, out_THD: Tensor, log_sum_TH: Tensor | None = None) -> None:
    """Computes the attention of one layer into out_THD, and the base-2 logarithms of the softmax's denominators into
    log_sum_TH (fp32) if it is given."""
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale} if cache.k_NPGD.dtype == FP8 else {}
    logs = {} if log_sum_TH is None else {"lse": log_sum_TH, "return_lse": True}
    wrapper.run(q_THD.contiguous(), (cache.k_NPGD, cache.v_NPGD), out=out_THD, **logs, **scales)


def shape_of(spec: AttentionSpec, layer: LayerAttention) -> tuple[int, int, int, int]:
    """Returns what every plan is told of a layer's shape."""
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, spec.block_size


def options_of(spec: AttentionSpec, layer: LayerAttention) -> dict[str, Any]:
    """Returns the options of every plan."""
    return {
        "window_left": -1 if layer.window is None else layer.window - 1,  # FlashInfer's does not count the token itself
        "sm_scale": layer.scale,
        "logits_soft_cap": layer.softcap,
        "q_data_type": spec.dtype,
        "kv_data_type": spec.kv_dtype,
    }
