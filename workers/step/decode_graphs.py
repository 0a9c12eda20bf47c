"""Runs decode steps as CUDA graphs: one launch instead of hundreds, for batches in which every sequence computes one
token.

There are graphs for each of a dense set of batch sizes: one without adapters, so that base steps pay nothing for them,
others for few and for many tiles of adapters' tokens, and one that also launches Kronecker products. A step uses the
smallest graph that fits. Rows without a sequence compute on block `trash` and are ignored. Graphs with adapters may
leave some of the GPU's SMs to the LoRA kernels (kernels/lora/sm_split.py).

Attention plans and adapter tables are refilled in place before a replay. A graph begins by reading the last step's
tokens. It ends by writing its own, chosen greedily, where the next one reads them. All graphs share one memory pool,
since only one runs at a time.
"""

# B rows of the graph · W this rank's part of the vocabulary

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch, count_tiles
from lorafleet.kernels.lora.sm_split import HIGH_PRIORITY, UNSPLIT, SMSplit, split_for
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionBatch, KVCache
from lorafleet.workers.device.sampler import greedy_of_ranks
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.model_manager import LoRAModelManager

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured decode step. Its outputs, like its tokens, are valid until the next step."""

    num_rows: int  # batch size of the graph
    graph: torch.cuda.CUDAGraph
    attention: AttentionBackend
    lora: LoRABatch | None
    hidden_BD: Tensor  # the model's output
    logits_BW: Tensor  # DecoderModel.logits of hidden_BD


def graph_sizes(most: int) -> list[int]:
    """Returns batch sizes that are dense enough for little padding. From 32 on they grow by at most a quarter."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most + 1, 32), most}
    return sorted(size for size in sizes if size <= most)


class DecodeGraphs:
    """All graphs for decode steps. The constructor raises what capturing raises. `trash` is a KV block that no
    sequence is ever given."""

    def __init__(
        self,
        model: DecoderModel,
        caches: list[KVCache],
        attention: AttentionBackend,
        inputs: StepInputs,
        sizes: Sequence[int],
        trash: int,
        loras: LoRAModelManager | None,
        max_context: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._caches = caches
        self._device = device
        self._inputs = inputs
        self._trash = trash
        self._loras = loras
        self._pool = torch.cuda.graph_pool_handle()
        # All captures share these streams, one for each priority, since the allocator reserves memory, and cuBLAS its
        # workspace, for each stream.
        self._main = {priority: torch.cuda.Stream(device, priority) for priority in (0, HIGH_PRIORITY)}
        self._side = {priority: torch.cuda.Stream(device, priority) for priority in (0, HIGH_PRIORITY)}
        self._may_split = may_split(model)
        # by batch size and number of LoRA tiles, 0 without adapters
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self._with_kronecker: dict[int, DecodeGraph] = {}  # by batch size
        started = time.monotonic()
        with torch.inference_mode():
            self._capture_all(attention, sizes, max_context)
        count = len(self._graphs) + len(self._with_kronecker)
        log.info("captured %d CUDA graphs for decode steps in %.1f s", count, time.monotonic() - started)

    def _capture_all(self, attention: AttentionBackend, sizes: Sequence[int], max_context: int) -> None:
        for size in sorted(sizes, reverse=True):  # largest first, so that the others fit into its memory
            backend = attention.for_graph(size, max_context)
            if backend is None:
                return
            self._graphs[size, 0] = self._capture(size, backend, None)
            if self._loras is not None:
                for num_tiles in self._loras.tile_counts(size):
                    lora = self._loras.static_batch(size, num_tiles)
                    split = split_for(self._device, size, num_tiles, self._loras.max_rank)
                    self._run_beside(lora, split if self._may_split else UNSPLIT)
                    self._graphs[size, num_tiles] = self._capture(size, backend, lora)
                lora = self._loras.static_batch(size, self._loras.tile_counts(size)[-1], takes_kronecker=True)
                self._run_beside(lora, UNSPLIT)  # no split was measured with Kronecker products
                self._with_kronecker[size] = self._capture(size, backend, lora)

    def _run_beside(self, lora: LoRABatch, split: SMSplit) -> None:
        lora.run_beside(split, self._side[split.lora_priority])

    def find(self, lora_slots: list[int]) -> DecodeGraph | None:
        """Returns the graph that fits with the fewest rows, then the fewest tiles, or None if none is large enough.

        `lora_slots` has each sequence's slot, or BASE_SLOT.
        """
        size = min((size for size, _ in self._graphs if size >= len(lora_slots)), default=None)
        if size is None:
            return None
        if all(slot == BASE_SLOT for slot in lora_slots):
            return self._graphs[size, 0]
        if self._loras is not None and self._loras.adds_kronecker(lora_slots):
            return self._with_kronecker[size]
        needed = count_tiles(lora_slots, size)
        return self._graphs[size, min(tiles for rows, tiles in self._graphs if rows == size and tiles >= needed)]

    def run(
        self, decode: DecodeGraph, batch: AttentionBatch, lora_slots: list[int], slot_ranks: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Returns the model's output and its DecoderModel.logits, one row per sequence. Greedy tokens are in
        StepInputs.sampled_B.

        The inputs must have been uploaded.

        Args:
            lora_slots: Each sequence's slot, or BASE_SLOT.
            slot_ranks: LoRAModelManager.ranks, of every slot.
        """
        num_seqs = len(lora_slots)
        padding = [1] * (decode.num_rows - num_seqs)
        decode.attention.plan(
            AttentionBatch(
                query_lens=batch.query_lens + padding,
                context_lens=batch.context_lens + padding,
                block_tables=[*batch.block_tables, *([self._trash] for _ in padding)],
            )
        )
        if decode.lora is not None:
            decode.lora.fill(lora_slots, slot_ranks)
        self._inputs.mark_copied()
        decode.graph.replay()
        return decode.hidden_BD[:num_seqs], decode.logits_BW[:num_seqs]

    def _capture(self, size: int, attention: AttentionBackend, lora: LoRABatch | None) -> DecodeGraph:
        attention.plan(AttentionBatch([1] * size, [1] * size, [[self._trash]] * size))
        self._inputs.fill_with_padding(size)
        inputs = self._inputs.tensors(size)

        def forward() -> tuple[Tensor, Tensor]:
            hidden_BD: Tensor = self._model(
                inputs.tokens(),
                inputs.position_T,
                inputs.rope_length_T,
                inputs.kv_slot_T,
                self._caches,
                attention,
                lora,
            )
            # The logits stay in the model's dtype. Finding the largest needs no float32, and a copy takes 100 us at
            # 256 rows.
            logits_BW = self._model.logits(hidden_BD)
            self._inputs.sampled_B[:size].copy_(greedy_of_ranks(logits_BW, self._model.group))
            return hidden_BD, logits_BW

        torch.cuda.synchronize(self._device)
        stream = self._main[0 if lora is None else lora.split.gemm_priority]
        with torch.cuda.stream(stream):
            forward()  # compiles kernels and creates library handles, which a capture must not do
        graph = torch.cuda.CUDAGraph()
        # The capture is of this thread only, since NCCL's thread queries events meanwhile, which would otherwise break
        # it.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            hidden_BD, logits_BW = forward()
        return DecodeGraph(size, graph, attention, lora, hidden_BD, logits_BW)


def may_split(model: DecoderModel) -> bool:
    """Returns whether the splits of the GPU were measured with a model like this one: its linears are whole and plain,
    so cuBLAS multiplies them, and it has no experts."""
    plain = all(isinstance(linear.weight, PlainWeight) for _, linear in model.packed_linears())
    return plain and model.shard.size == 1 and not model.mixtures()
