"""Computes paged attention with FlashInfer, the fastest backend on data-center GPUs.

It serves only half precision and the usual head sizes, and neither sinks nor chunks (flashinfer_refusal). Decodes at
the front of a step use FlashInfer's XQA if the cache is FP8 (xqa_attention.py), else its tensor-core decode. The other
sequences use its paged prefill. On Hopper that is FA3, which gives each decode a tile of 128 queries: 120 decodes would
take 0.4 ms per layer there. Short chunks of long prompts would leave most of the GPU idle, so their contexts are
divided (divided_prompts.py). Each kind of layer has its own wrappers, since its shape and its window are compiled in
and planned for. FlashInfer compiles its kernels on first use, which takes a minute or two with nvcc. The constructor
does that, so that no request waits for it, unless a start finds that they are missing (flashinfer_modules.py).
FlashInfer plans on the host, except for XQA. A plan takes lengths and blocks there and copies them to the device from
pinned memory, so that it never waits for the steps before it.
Measured on an H200 (D=128, 32 heads, 8 KV heads, block 16, bf16): decode takes 16 us for 1 x 8192 tokens of context
and 145 us for 128 x 1024, and 1.5 times that without tensor cores. Prefill reaches 438 TFLOP/s with FA3, and 305 with
FA2, which serves other GPUs.
"""

# T tokens of the step · B sequences · M their KV blocks in all · H query heads · D head size

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import (
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.divided_prompts import DividedPrompts, Division, may_divide
from lorafleet.workers.attention.flashinfer_calls import PlacedPrompts, options_of, plan_prompts, run_layer, shape_of
from lorafleet.workers.attention.kv_pages import BlockTables, KVPages
from lorafleet.workers.attention.prompt_tiles import best_parts
from lorafleet.workers.attention.xqa_attention import SEMAPHORE_BYTES, XQAAttention, xqa_refusal

log = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation; shared, since only one wrapper runs at a time


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
        self._workspace = workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self._graph_memory = torch.zeros(0, dtype=torch.int32, device=spec.device)
        self._kinds = spec.kinds
        self._kind_of_layer = spec.kind_of_layer
        capability = torch.cuda.get_device_capability(spec.device)
        self._semaphores = self._choose_xqa(capability)
        self._xqa: XQAAttention | None = None
        self._decode: list[Any] = []  # One of each kind of layer, as in self._kinds.
        if self._semaphores is not None:
            self._xqa = XQAAttention(spec, caches, workspace, self._semaphores)
        else:
            self._decode = [
                BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True) for _ in self._kinds
            ]
        self._prefill: list[Any] = [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in self._kinds]
        self._divided: list[DividedPrompts | None] = [
            DividedPrompts(spec, kind, workspace) if may_divide(spec, kind, capability) else None
            for kind in self._kinds
        ]
        self._is_divided = [False] * len(self._kinds)  # Whether this step's prompts are, by kind of layer.
        self._num_decodes = 0
        self._copied = torch.cuda.Event()
        if compiles:
            for use in self.first_uses():
                use()

    def _choose_xqa(self, capability: tuple[int, int]) -> Tensor | None:
        """Returns XQA's semaphores, or None if it cannot serve. Logs what computes the decodes."""
        spec = self._spec
        refusal = xqa_refusal(spec, capability)
        if refusal is not None:
            log.info("attention of decodes: FlashInfer's wrapper, and not XQA, since %s", refusal)
            return None
        log.info("attention of decodes: FlashInfer's XQA")
        return torch.zeros(SEMAPHORE_BYTES // 4, dtype=torch.int32, device=spec.device)

    def for_graph(
        self, num_seqs: int, max_context: int, drafts: DraftRows | None = None
    ) -> FlashInferGraphAttention | XQAAttention | None:
        if drafts is not None:
            return None
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
        shape, fixed = shape_of(spec, layer), options_of(spec, layer)
        self._decode[kind].plan(pages.starts, blocks, pages.last_lens, *shape, seq_lens=pages.lens, **fixed)

    def _plan_prompts(self, batch: AttentionBatch) -> None:
        placed: PlacedPrompts | None = None  # The same for all kinds of layers whose prompts are not divided.
        for kind, layer in enumerate(self._kinds):
            divided, parts = self._divided[kind], 1
            if divided is not None:
                parts = best_parts(batch.query_lens, batch.context_lens, layer.num_heads, self._num_sms)
            self._is_divided[kind] = parts > 1
            if divided is not None and parts > 1:
                divided.plan(Division.of(batch, parts, self._spec.block_size))
                continue
            placed = placed or PlacedPrompts.of(batch, self._spec.block_size, self._spec.device)
            plan_prompts(self._prefill[kind], self._spec, layer, placed)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        kind, cache, count = self._kind_of_layer[layer], self._caches[layer], self._num_decodes
        if count > 0 and self._xqa is not None:
            self._xqa.attend(layer, q_THD[:count], out_THD[:count])
        elif count > 0:
            run_layer(self._decode[kind], q_THD[:count], cache, out_THD[:count])
        if count < len(q_THD):
            self._attend_prompts(kind, q_THD[count:], cache, out_THD[count:])
        return out_THD

    def _attend_prompts(self, kind: int, q_THD: Tensor, cache: KVCache, out_THD: Tensor) -> None:
        divided = self._divided[kind]
        if divided is not None and self._is_divided[kind]:
            divided.attend(q_THD, cache, out_THD)
        else:
            run_layer(self._prefill[kind], q_THD, cache, out_THD)

    def first_uses(self) -> Iterator[Callable[[], None]]:
        """Yields a callable for each kernel that is compiled or loaded at its first use. It runs the kernel once, over
        block 0 of the first layer of its kind, whatever lies there."""
        for kind in range(len(self._kinds)):
            yield partial(self._use, kind, 1)
            yield partial(self._use, kind, 2)
            if self._divided[kind] is not None:
                yield partial(self._use, kind, 2, 2)

    def _use(self, kind: int, tokens: int, parts: int = 1) -> None:
        """Runs a sequence of so many tokens through the wrappers of one kind of layer: as a decode, or as a prompt,
        behind a block for each of several parts."""
        spec, layer, divided = self._spec, self._kinds[kind], self._divided[kind]
        context = tokens + (parts * spec.block_size if parts > 1 else 0)
        batch = AttentionBatch([tokens], [context], [[0] * -(-context // spec.block_size)])
        self._num_decodes = 1 if tokens == 1 else 0
        self._is_divided[kind] = parts > 1
        if divided is not None and parts > 1:
            divided.plan(Division.of(batch, parts, spec.block_size, long_context=1))
        elif tokens > 1:
            plan_prompts(self._prefill[kind], spec, layer, PlacedPrompts.of(batch, spec.block_size, spec.device))
        elif self._xqa is not None:
            self._xqa.plan(batch)
        else:
            pages = KVPages.of(batch, spec.block_size)
            self._plan_decodes_of(kind, pages, pages.blocks.to(spec.device, non_blocking=True))
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
            wrapper.plan(first.starts, first.blocks, first.last_lens, *shape_of(spec, kind), **options_of(spec, kind))
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
                *shape_of(spec, kind),
                global_override_indptr_cpu=pages.starts,
                **options_of(spec, kind),
            )
        self._copied.record()

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> None:  # noqa: ARG002  this is one
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        run_layer(self._wrappers[self._kind_of_layer[layer]], q_THD, self._caches[layer], out_THD)
        return out_THD
