"""Computes decodes with FlashInfer's XQA kernels, which read block tables and lengths on the device.

So a step needs no plan on the host, and a captured step serves any lengths. On Hopper, XQA has a kernel of its own for
caches of e4m3. It computes both products in e4m3: it rounds the queries, and the weights relative to the largest one
so far, to four significant bits, as the cache's keys and values are rounded already. FlashInfer's wrappers convert the
cache instead.
Measured on an H200 (D=128, 32 heads, 8 KV heads, block 16), microseconds a layer, wrapper -> XQA:
- e4m3: 1 x 576 tokens 15 -> 6, 64 x 576 58 -> 26, 256 x 576 200 -> 85, 1 x 8192 19 -> 15, 8 x 32768 212 -> 180
- bf16: 1 x 576 10.4 -> 8.6, 8 x 576 16.2 -> 12.8, 64 x 576 53 -> 52, 256 x 576 168 -> 181, 8 x 32768 251 -> 306. The
  gain for few sequences, 1 or 2 % of a step, does not pay for a minute of compiling.
"""

# T tokens of the step, one of each sequence · H query heads · D head size

from __future__ import annotations

import math

import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import (
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.kv_pages import BlockTables

CAPABILITY = (9, 0)  # the only one that is measured; FlashInfer has XQA for 10 and 12 too
XQA_SHAPES = ((128, 4),)  # head_dim, query heads of a KV head: those whose tests have passed on a GPU
XQA_BLOCK_SIZES = (16, 32, 64, 128)
SEMAPHORE_BYTES = 8 << 20  # FlashInfer's size; a kernel leaves them zero, as it must find them


def xqa_refusal(spec: AttentionSpec, capability: tuple[int, int]) -> str | None:
    """Returns why XQA does not serve on a GPU of this compute capability, or None if it does."""
    if spec.kv_dtype != FP8:
        return "it is faster for FP8 caches only"
    if capability != CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, not {CAPABILITY[0]}.{CAPABILITY[1]}"
    if spec.block_size not in XQA_BLOCK_SIZES:
        return f"blocks have {spec.block_size} tokens, not {', '.join(map(str, XQA_BLOCK_SIZES))}"
    return next((reason for kind in spec.kinds if (reason := _layer_refusal(kind)) is not None), None)


def _layer_refusal(layer: LayerAttention) -> str | None:
    head_dim, group = layer.head_dim, layer.group_size
    if (head_dim, group) not in XQA_SHAPES or layer.out_dim != head_dim:
        return f"it has not been tested with head_dim={head_dim} and {group} query heads for each KV head"
    if layer.softcap is not None:
        return "scores are capped"
    if layer.window is not None:
        return "it has not been tested with sliding windows"
    if layer.chunk is not None or layer.has_sinks:
        return "it has not been tested with chunks or sinks"
    return None


class XQAAttention:
    """Computes steps in which every sequence computes one token. FlashInfer compiles its kernels at the first attend().

    Args:
        workspace: Scratch memory, uint8, as for FlashInfer's wrappers. Only one kernel may use it at a time.
        semaphores: SEMAPHORE_BYTES of zeros, for the kernels that share the workspace.
        fixed: Tables that captured kernels read and that plan() rewrites. None makes new ones for each step.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        caches: list[KVCache],
        workspace: Tensor,
        semaphores: Tensor,
        fixed: BlockTables | None = None,
    ) -> None:
        from flashinfer.xqa import xqa

        self._xqa = xqa
        self._spec = spec
        self._caches = caches
        self._workspace = workspace
        self._semaphores = semaphores.view(torch.uint32)
        self._fixed = fixed
        self._tables = fixed

    def plan(self, batch: AttentionBatch) -> None:
        assert max(batch.query_lens) == 1
        tables = BlockTables.of(batch, self._spec.block_size, self._spec.device)
        if self._fixed is None:
            self._tables = tables
        else:
            self._fixed.assign(tables)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> None:  # noqa: ARG002  FlashInferAttention makes them
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        own, cache, tables = self._spec.layers[layer], self._caches[layer], self._tables
        assert tables is not None, "plan() comes first"
        assert len(q_THD) == len(tables.lens_B)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
        assert out_THD.is_contiguous()
        self._xqa(
            q_THD.contiguous().unsqueeze(1),
            cache.k_NPGD,
            cache.v_NPGD,
            tables.blocks_BW,
            tables.lens_B.unsqueeze(1).view(torch.uint32),
            out_THD.unsqueeze(1),
            self._workspace,
            self._semaphores,
            own.num_kv_heads,
            self._spec.block_size,
            # XQA multiplies the scores by q_scale * kv_scale / sqrt(D), and the result by kv_scale.
            q_scale=float(own.scale * math.sqrt(own.head_dim) * cache.k_scale / cache.v_scale),
            kv_scale=float(cache.v_scale),
            sliding_win_size=own.window or 0,  # like ours, it counts the token itself; 0 is none
        )
        return out_THD
