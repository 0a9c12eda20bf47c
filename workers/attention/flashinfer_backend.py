"""Computes paged attention with FlashInfer, the fastest backend on data-center GPUs.

It serves only half precision and the usual head sizes, and neither sinks nor chunks (flashinfer_refusal). Decodes at
the front of a step use FlashInfer's XQA if the cache is FP8 (xqa_attention.py), else its tensor-core decode. The other
sequences use its paged prefill. On Hopper that is FA3, which gives each decode a tile of 128 queries: 120 decodes would
take 0.4 ms per layer there. Short chunks of long prompts would leave most of the GPU idle (prompt_tiles.py), so FA2
computes them, which divides keys too. Each kind of layer has its own wrappers, since its shape and its window are
compiled in and planned for. FlashInfer compiles its kernels on first use, which takes a minute or two with nvcc. The
constructor does that, so that no request waits for it, unless a start finds that they are missing
(flashinfer_modules.py).
FlashInfer plans on the host, except for XQA. A plan takes lengths and blocks there and copies them to the device from
pinned memory, so that it never waits for the steps before it.
Measured on an H200 (D=128, 32 heads, 8 KV heads, block 16, bf16): decode takes 16 us for 1 x 8192 tokens of context
and 145 us for 128 x 1024, and 1.5 times that without tensor cores. Prefill reaches 438 TFLOP/s with FA3 and 305 with
FA2.
"""

# T tokens of the step · B sequences · M their KV blocks in all · H query heads · D head size

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.kv_pages import BlockTables, KVPages, pinned_copy, running_sums
from lorafleet.workers.attention.prompt_tiles import TILE_QUERIES, filled_share
from lorafleet.workers.attention.xqa_attention import SEMAPHORE_BYTES, XQAAttention, xqa_refusal

log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
FA3_CAPABILITY = (9, 0)
FA2_SPEED = 305 / 438  # of FA3's, while both fill the GPU
LONG_CONTEXT = 4096  # keys from which dividing them is worth another launch
WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation; shared, since only one wrapper runs at a time
MOST_WORKSPACE_BYTES = 256 << 20


def flashinfer_refusal(dtype: torch.dtype, layer: LayerAttention) -> str | None:
    """Returns why FlashInfer does not serve a layer, or None if it does."""
    if dtype not in DTYPES:
        return f"it has no {str(dtype).removeprefix('torch.')} kernels, only float16 and bfloat16"
    if layer.head_dim not in HEAD_DIMS:
        return f"it has no kernels for head_dim {layer.head_dim}, only {', '.join(map(str, HEAD_DIMS))}"
    if layer.out_dim != layer.head_dim:
        return f"it has not been tested with values of another size, {layer.out_dim}, than head_dim {layer.head_dim}"
    if layer.has_sinks:
        return "it has not been tested with attention sinks"
    if layer.chunk is not None:
        return "it has no kernels for chunked attention"
    return None


class FlashInferAttention:
    """Computes attention with FlashInfer's wrappers for decode and prefill.

    The constructor raises ImportError without flashinfer, and the compiler's error if the kernels cannot be built.
    """

    def __init__(self, spec: AttentionSpec, caches: list[KVCache], *, compiles: bool = True) -> None:
        """Without `compiles`, nothing is compiled until the callables of first_uses() run."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        assert len(caches) == len(spec.layers)
        self._spec = spec
        self._caches = caches
        self._num_sms = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self._workspace = workspace = torch.zeros(self._workspace_bytes(), dtype=torch.uint8, device=spec.device)
        self._graph_memory = torch.zeros(0, dtype=torch.int32, device=spec.device)
        self._kinds = spec.kinds
        self._kind_of_layer = spec.kind_of_layer
        self._semaphores = self._choose_xqa()
        self._xqa: XQAAttention | None = None
        self._decode: list[Any] = []  # One of each kind of layer, as in self._kinds.
        if self._semaphores is not None:
            self._xqa = XQAAttention(spec, caches, workspace, self._semaphores)
        else:
            self._decode = [
                BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True) for _ in self._kinds
            ]
        self._prefill: list[Any] = [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in self._kinds]
        # For short chunks with long contexts. None for kinds whose prompts are computed by FA2 anyway, or see few keys.
        self._divided: list[Any] = [
            BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2") if self._divides(kind) else None
            for kind in self._kinds
        ]
        self._chosen = list(self._prefill)  # The wrappers of this step's prompts, by kind.
        self._num_decodes = 0
        self._copied = torch.cuda.Event()
        if compiles:
            for use in self.first_uses():
                use()

    def _choose_xqa(self) -> Tensor | None:
        """Returns XQA's semaphores, or None if it cannot serve. Logs what computes the decodes."""
        spec = self._spec
        refusal = xqa_refusal(spec, torch.cuda.get_device_capability(spec.device))
        if refusal is not None:
            log.info("attention of decodes: FlashInfer's wrapper, and not XQA, since %s", refusal)
            return None
        log.info("attention of decodes: FlashInfer's XQA")
        return torch.zeros(SEMAPHORE_BYTES // 4, dtype=torch.int32, device=spec.device)

    def _workspace_bytes(self) -> int:
        needed = max(self._divided_bytes(kind) for kind in self._spec.kinds)
        return max(WORKSPACE_BYTES, min(needed, MOST_WORKSPACE_BYTES))

    def _divides(self, layer: LayerAttention) -> bool:
        """Returns whether FA2 may compute prompts of these layers that FA3 would compute otherwise."""
        has_fa3 = torch.cuda.get_device_capability(self._spec.device) == FA3_CAPABILITY
        is_plain = self._spec.kv_dtype == self._spec.dtype and layer.window is None
        return has_fa3 and is_plain and self._divided_bytes(layer) <= MOST_WORKSPACE_BYTES

    def _divided_bytes(self, layer: LayerAttention) -> int:
        """Returns the bytes of FA2's partial results: float32 values and a sum of each query of two programs for each
        multiprocessor."""
        programs = 2 * self._num_sms // layer.num_kv_heads
        return programs * layer.num_heads * TILE_QUERIES * (layer.head_dim + 1) * 4 + (1 << 20)

    def _wrapper_for(self, kind: int, batch: AttentionBatch) -> Any:
        """Returns the wrapper that computes these prompts fastest."""
        if self._divided[kind] is None or max(batch.context_lens) < LONG_CONTEXT:
            return self._prefill[kind]
        share = filled_share(batch.query_lens, batch.context_lens, self._kinds[kind].num_heads, self._num_sms)
        return self._divided[kind] if share < FA2_SPEED else self._prefill[kind]

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
        pages = KVPages.of(batch, self._spec.block_size)
        blocks = pages.blocks.to(self._spec.device, non_blocking=True)
        for kind in range(len(self._kinds)):
            self._plan_decodes_of(kind, pages, blocks)

    def _plan_decodes_of(self, kind: int, pages: KVPages, blocks: Tensor) -> None:
        spec, layer = self._spec, self._kinds[kind]
        shape, fixed = _shape(spec, layer), _options(spec, layer)
        self._decode[kind].plan(pages.starts, blocks, pages.last_lens, *shape, seq_lens=pages.lens, **fixed)

    def _plan_prompts(self, batch: AttentionBatch) -> None:
        pages = KVPages.of(batch, self._spec.block_size)
        query_starts = pinned_copy(running_sums(np.array(batch.query_lens)))
        blocks = pages.blocks.to(self._spec.device, non_blocking=True)
        for kind in range(len(self._kinds)):
            self._chosen[kind] = self._wrapper_for(kind, batch)
            self._plan_prompts_of(kind, batch, query_starts, pages, blocks)

    def _plan_prompts_of(
        self, kind: int, batch: AttentionBatch, query_starts: Tensor, pages: KVPages, blocks: Tensor
    ) -> None:
        spec, layer = self._spec, self._kinds[kind]
        self._chosen[kind].plan(
            query_starts,
            pages.starts,
            blocks,
            pages.last_lens,
            *_shape(spec, layer),
            causal=True,
            seq_lens=pages.lens,
            max_token_per_sequence=max(batch.query_lens),
            max_sequence_kv=max(batch.context_lens),
            **_options(spec, layer),
        )

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        kind, cache, count = self._kind_of_layer[layer], self._caches[layer], self._num_decodes
        if count > 0 and self._xqa is not None:
            self._xqa.attend(layer, q_THD[:count], out_THD[:count])
        elif count > 0:
            _run(self._decode[kind], q_THD[:count], cache, out_THD[:count])
        if count < len(q_THD):
            _run(self._chosen[kind], q_THD[count:], cache, out_THD[count:])
        return out_THD

    def first_uses(self) -> Iterator[Callable[[], None]]:
        """Yields a callable for each kernel that is compiled or loaded at its first use. It runs the kernel once, over
        block 0 of the first layer of its kind, whatever lies there."""
        for kind in range(len(self._kinds)):
            yield partial(self._use, kind, 1)
            for wrapper in (self._divided[kind], self._prefill[kind]):
                if wrapper is not None:
                    yield partial(self._use, kind, 2, wrapper)

    def _use(self, kind: int, tokens: int, prompts_by: Any = None) -> None:
        """Runs a sequence of so many tokens through a wrapper of one kind of layer: as a decode, or as a prompt."""
        spec, layer = self._spec, self._kinds[kind]
        batch = AttentionBatch([tokens], [tokens], [[0]])
        pages = KVPages.of(batch, spec.block_size)
        blocks = pages.blocks.to(spec.device, non_blocking=True)
        self._num_decodes = 1 if tokens == 1 else 0
        if tokens > 1:
            self._chosen[kind] = prompts_by
            self._plan_prompts_of(kind, batch, pinned_copy(running_sums(np.array([tokens]))), pages, blocks)
        elif self._xqa is not None:
            self._xqa.plan(batch)
        else:
            self._plan_decodes_of(kind, pages, blocks)
        self._copied.record()
        q_THD = torch.zeros(tokens, layer.num_heads, layer.head_dim, dtype=spec.dtype, device=spec.device)
        self.attend(self._kind_of_layer.index(kind), q_THD)


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
        self._kinds = spec.kinds
        self._kind_of_layer = spec.kind_of_layer
        self._wrappers: list[Any] = [
            BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=on_device.starts,
                paged_kv_indices_buffer=on_device.blocks,
                paged_kv_last_page_len_buffer=on_device.last_lens,
            )
            for _ in self._kinds
        ]
        # The first plan chooses and loads the kernels. The later ones use fast_decode_plan, which relies on that.
        first = KVPages.of(AttentionBatch([1] * num_seqs, [1] * num_seqs, [[0]] * num_seqs), spec.block_size)
        for kind, wrapper in zip(self._kinds, self._wrappers, strict=True):
            wrapper.plan(first.starts, first.blocks, first.last_lens, *_shape(spec, kind), **_options(spec, kind))
        self._copied.record()

    def plan(self, batch: AttentionBatch) -> None:
        spec = self._spec
        pages = KVPages.of(batch, spec.block_size)
        self._memory[: len(pages.memory)].copy_(pages.memory, non_blocking=True)
        self._copied.synchronize()  # as in FlashInferAttention.plan
        for kind, wrapper in zip(self._kinds, self._wrappers, strict=True):
            self._replan(
                wrapper,
                pages.starts,
                pages.blocks,
                pages.last_lens,
                *_shape(spec, kind),
                global_override_indptr_cpu=pages.starts,
                **_options(spec, kind),
            )
        self._copied.record()

    def for_graph(self, num_seqs: int, max_context: int) -> None:  # noqa: ARG002  this is one
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        _run(self._wrappers[self._kind_of_layer[layer]], q_THD, self._caches[layer], out_THD)
        return out_THD


def _run(wrapper: Any, q_THD: Tensor, cache: KVCache, out_THD: Tensor) -> None:
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale} if cache.k_NPGD.dtype == FP8 else {}
    wrapper.run(q_THD.contiguous(), (cache.k_NPGD, cache.v_NPGD), out=out_THD, **scales)


def _shape(spec: AttentionSpec, layer: LayerAttention) -> tuple[int, int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, spec.block_size


def _options(spec: AttentionSpec, layer: LayerAttention) -> dict[str, Any]:
    return {
        "window_left": -1 if layer.window is None else layer.window - 1,  # FlashInfer's does not count the token itself
        "sm_scale": layer.scale,
        "logits_soft_cap": layer.softcap,
        "q_data_type": spec.dtype,
        "kv_data_type": spec.kv_dtype,
    }
