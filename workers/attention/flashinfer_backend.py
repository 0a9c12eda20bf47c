"""Computes paged attention with FlashInfer, the fastest backend on data-center GPUs.

It serves only half precision and the usual head sizes. Decodes at the front of a step use FlashInfer's XQA if the cache
is FP8 (xqa_attention.py), else its tensor-core decode. The other sequences use its paged prefill. On Hopper
that is FA3, which gives each decode a tile of 128 queries: 120 decodes would take 0.4 ms per layer there. Each distinct
sliding window has its own wrappers, since a window is compiled in and planned for. FlashInfer compiles its kernels on
first use, which takes a minute or two with nvcc. The constructor does that, so that no request waits for it.
FlashInfer plans on the host, except for XQA. A plan takes lengths and blocks there and copies them to the device from
pinned memory, so that it never waits for the steps before it.
Measured on an H200 (D=128, 32 heads, 8 KV heads, block 16, bf16): decode takes 16 us for 1 x 8192 tokens of context
and 145 us for 128 x 1024, and 1.5 times that without tensor cores. Prefill reaches 438 TFLOP/s with FA3 and 305 with
FA2.
"""

# T tokens of the step · B sequences · M their KV blocks in all · H query heads · D head size

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache
from lorafleet.workers.attention.kv_pages import BlockTables, KVPages, pinned_copy, running_sums
from lorafleet.workers.attention.xqa_attention import SEMAPHORE_BYTES, XQAAttention, xqa_refusal

log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation; shared, since only one wrapper runs at a time


class FlashInferAttention:
    """Computes attention with FlashInfer's wrappers for decode and prefill.

    The constructor raises ImportError without flashinfer, and the compiler's error if the kernels cannot be built.
    """

    def __init__(self, spec: AttentionSpec, caches: list[KVCache]) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        assert len(caches) == len(spec.sliding_windows)
        self._spec = spec
        self._caches = caches
        self._workspace = workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._graph_memory = torch.zeros(0, dtype=torch.int32, device=spec.device)
        windows = set(spec.sliding_windows)
        self._semaphores = self._choose_xqa()
        self._xqa: XQAAttention | None = None
        self._decode: dict[int | None, Any] = {}
        if self._semaphores is not None:
            self._xqa = XQAAttention(spec, caches, workspace, self._semaphores)
        else:
            self._decode = {
                w: BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True) for w in windows
            }
        self._prefill: dict[int | None, Any] = {
            w: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for w in windows
        }
        self._num_decodes = 0
        self._copied = torch.cuda.Event()
        self._compile()

    def _choose_xqa(self) -> Tensor | None:
        """Returns XQA's semaphores, or None if it cannot serve. Logs what computes the decodes."""
        spec = self._spec
        refusal = xqa_refusal(spec, torch.cuda.get_device_capability(spec.device))
        if refusal is not None:
            log.info("attention of decodes: FlashInfer's wrapper, and not XQA, since %s", refusal)
            return None
        log.info("attention of decodes: FlashInfer's XQA")
        return torch.zeros(SEMAPHORE_BYTES // 4, dtype=torch.int32, device=spec.device)

    def for_graph(self, num_seqs: int, max_context: int) -> FlashInferGraphAttention | XQAAttention:
        spec = self._spec
        # Sequences that share a prefix list its blocks more than once, so the cache's size is no bound.
        most_blocks = -(-max_context // spec.block_size)
        size = KVPages.size(num_seqs, num_seqs * most_blocks)
        if len(self._graph_memory) < size:
            self._graph_memory = torch.zeros(size, dtype=torch.int32, device=spec.device)
        if self._semaphores is not None:
            fixed = BlockTables.within(self._graph_memory, num_seqs, most_blocks)
            return XQAAttention(spec, self._caches, self._workspace, self._semaphores, fixed)
        return FlashInferGraphAttention(spec, self._caches, self._workspace, self._graph_memory, num_seqs)

    def plan(self, batch: AttentionBatch) -> None:
        lens = batch.query_lens
        self._num_decodes = count = next((i for i, length in enumerate(lens) if length > 1), len(lens))
        contexts, tables = batch.context_lens, batch.block_tables
        self._copied.synchronize()  # the last plan's copies from FlashInfer's pinned memory, usually long done
        if count > 0:
            self._plan_decodes(AttentionBatch(lens[:count], contexts[:count], tables[:count]))
        if count < len(lens):
            self._plan_prompts(AttentionBatch(lens[count:], contexts[count:], tables[count:]))
        self._copied.record()

    def _plan_decodes(self, batch: AttentionBatch) -> None:
        if self._xqa is not None:
            self._xqa.plan(batch)
            return
        spec, pages = self._spec, KVPages.of(batch, self._spec.block_size)
        blocks = pages.blocks.to(spec.device, non_blocking=True)
        for window, wrapper in self._decode.items():
            fixed = _options(spec, window)
            wrapper.plan(pages.starts, blocks, pages.last_lens, *_shape(spec), seq_lens=pages.lens, **fixed)

    def _plan_prompts(self, batch: AttentionBatch) -> None:
        spec, pages = self._spec, KVPages.of(batch, self._spec.block_size)
        query_starts = pinned_copy(running_sums(np.array(batch.query_lens)))
        blocks = pages.blocks.to(spec.device, non_blocking=True)
        for window, wrapper in self._prefill.items():
            wrapper.plan(
                query_starts,
                pages.starts,
                blocks,
                pages.last_lens,
                *_shape(spec),
                causal=True,
                seq_lens=pages.lens,
                max_token_per_sequence=max(batch.query_lens),
                max_sequence_kv=max(batch.context_lens),
                **_options(spec, window),
            )

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        window, cache, count = self._spec.sliding_windows[layer], self._caches[layer], self._num_decodes
        if count > 0 and self._xqa is not None:
            self._xqa.attend(layer, q_THD[:count], out_THD[:count])
        elif count > 0:
            _run(self._decode[window], q_THD[:count], cache, out_THD[:count])
        if count < len(q_THD):
            _run(self._prefill[window], q_THD[count:], cache, out_THD[count:])
        return out_THD

    def _compile(self) -> None:
        """Compiles the kernels by running each wrapper once over block 0 of its first layer, whatever lies there."""
        spec = self._spec
        for tokens in (1, 2):
            self.plan(AttentionBatch([tokens], [tokens], [[0]]))
            q_THD = torch.zeros(tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
            for window in set(spec.sliding_windows):
                self.attend(spec.sliding_windows.index(window), q_THD)


class FlashInferGraphAttention:
    """Decodes a fixed number of sequences. plan() rewrites the memory that the captured kernels read.

    Args:
        memory: int32 on the device, laid out as KVPages. All sizes share it, since one graph runs at a time.
    """

    def __init__(
        self, spec: AttentionSpec, caches: list[KVCache], workspace: Tensor, memory: Tensor, num_seqs: int
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
        from flashinfer.decode import fast_decode_plan

        self._spec = spec
        self._caches = caches
        self._memory = memory
        self._replan = fast_decode_plan
        self._copied = torch.cuda.Event()
        on_device = KVPages(memory, num_seqs)
        self._wrappers: dict[int | None, Any] = {
            window: BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=on_device.starts,
                paged_kv_indices_buffer=on_device.blocks,
                paged_kv_last_page_len_buffer=on_device.last_lens,
            )
            for window in set(spec.sliding_windows)
        }
        # The first plan chooses and loads the kernels. The later ones use fast_decode_plan, which relies on that.
        first = KVPages.of(AttentionBatch([1] * num_seqs, [1] * num_seqs, [[0]] * num_seqs), spec.block_size)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(first.starts, first.blocks, first.last_lens, *_shape(spec), **_options(spec, window))
        self._copied.record()

    def plan(self, batch: AttentionBatch) -> None:
        spec = self._spec
        pages = KVPages.of(batch, spec.block_size)
        self._memory[: len(pages.memory)].copy_(pages.memory, non_blocking=True)
        self._copied.synchronize()  # as in FlashInferAttention.plan
        for window, wrapper in self._wrappers.items():
            self._replan(
                wrapper,
                pages.starts,
                pages.blocks,
                pages.last_lens,
                *_shape(spec),
                global_override_indptr_cpu=pages.starts,
                **_options(spec, window),
            )
        self._copied.record()

    def for_graph(self, num_seqs: int, max_context: int) -> None:  # noqa: ARG002  this is one
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        _run(self._wrappers[self._spec.sliding_windows[layer]], q_THD, self._caches[layer], out_THD)
        return out_THD


def _run(wrapper: Any, q_THD: Tensor, cache: KVCache, out_THD: Tensor) -> None:
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale} if cache.k_NPGD.dtype == FP8 else {}
    wrapper.run(q_THD.contiguous(), (cache.k_NPGD, cache.v_NPGD), out=out_THD, **scales)


def _shape(spec: AttentionSpec) -> tuple[int, int, int, int]:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size


def _options(spec: AttentionSpec, window: int | None) -> dict[str, Any]:
    return {
        "window_left": -1 if window is None else window - 1,  # FlashInfer's does not count the token itself
        "sm_scale": spec.scale,
        "logits_soft_cap": spec.softcap,
        "q_data_type": spec.dtype,
        "kv_data_type": spec.kv_dtype,
    }
