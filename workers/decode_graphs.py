"""Decode steps as CUDA graphs: one launch instead of hundreds, for batches in which every sequence computes one token.

There is a graph for each of a dense set of batch sizes, each twice: without adapters, so that base steps pay nothing
for them, and with. A step takes the smallest that fits; rows without a sequence compute on block `trash` and are
ignored. Attention plans and adapter tables are refilled in place before a replay. All graphs share one memory pool,
since one runs at a time.
"""

# B rows of the graph · V vocabulary · F the fields of a row

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.workers.attention.base import AttentionBackend, AttentionBatch, KVCache
from lorafleet.workers.feedback import Feedback
from lorafleet.workers.lora.config import LoRAConfig
from lorafleet.workers.models.decoder import DecoderModel

log = logging.getLogger(__name__)

FIELDS = 3  # token, position, where its key and value go


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token a sequence, in parallel lists. kv_slots: block * block size + offset. lora_slots: or BASE_SLOT.

    slot_ranks: of every slot, LoRAModelManager.ranks.
    """

    tokens: list[int]
    positions: list[int]
    kv_slots: list[int]
    lora_slots: list[int]
    block_tables: list[list[int]]
    slot_ranks: list[int]


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs_FB: Tensor
    attention: AttentionBackend
    lora: LoRABatch | None
    logits_BV: Tensor


def graph_sizes(most: int) -> list[int]:
    """Batch sizes, dense enough that padding costs little: steps of a quarter of the size at most."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most + 1, 32), most}
    return sorted(size for size in sizes if size <= most)


class DecodeGraphs:
    """Raises what capturing raises. trash: a KV block that no sequence is ever given."""

    def __init__(
        self,
        model: DecoderModel,
        caches: list[KVCache],
        attention: AttentionBackend,
        sizes: Sequence[int],
        trash: int,
        lora: LoRAConfig | None,
        max_context: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._caches = caches
        self._device = device
        self._trash = trash
        self._trash_slot = trash * caches[0].k_NPGD.shape[1]
        self._lora = lora
        self._pool = torch.cuda.graph_pool_handle()
        self._staging_FB = torch.zeros(FIELDS, max(sizes), dtype=torch.int64, pin_memory=True)
        self._copied = torch.cuda.Event()
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        started = time.monotonic()
        with torch.inference_mode():
            self._capture_all(attention, sizes, max_context)
        log.info("%d CUDA graphs in %.1f s", len(self._graphs), time.monotonic() - started)

    def _capture_all(self, attention: AttentionBackend, sizes: Sequence[int], max_context: int) -> None:
        for size in sorted(sizes, reverse=True):  # the largest first: the others fit into its memory
            backend = attention.for_graph(size, max_context)
            if backend is None:
                return
            inputs_FB = torch.zeros(FIELDS, size, dtype=torch.int64, device=self._device)
            for with_lora in (False, True) if self._lora is not None else (False,):
                self._graphs[size, with_lora] = self._capture(size, inputs_FB, backend, with_lora)

    def run(self, step: DecodeStep, feedback: Feedback | None) -> Tensor | None:
        """Logits float32 [number of sequences, V], valid until the next run; None where no graph is large enough."""
        count = len(step.tokens)
        with_lora = any(slot != BASE_SLOT for slot in step.lora_slots)
        captured = min(
            (found for (size, lora), found in self._graphs.items() if size >= count and lora == with_lora),
            key=lambda found: found.inputs_FB.shape[1],
            default=None,
        )
        if captured is None:
            return None
        self._fill(captured, step)
        if feedback is not None:
            feedback.fill(captured.inputs_FB[0, :count])
        captured.graph.replay()
        return captured.logits_BV[:count]

    def _fill(self, captured: _Captured, step: DecodeStep) -> None:
        size = captured.inputs_FB.shape[1]
        padding = size - len(step.tokens)
        rows = (
            step.tokens + [0] * padding,
            step.positions + [0] * padding,
            step.kv_slots + [self._trash_slot] * padding,
        )
        self._copied.synchronize()  # the last step's copies out of pinned memory; long over as a rule
        self._staging_FB[:, :size] = torch.tensor(rows)
        captured.inputs_FB.copy_(self._staging_FB[:, :size], non_blocking=True)
        captured.attention.plan(
            AttentionBatch(
                query_lens=[1] * size,
                context_lens=[position + 1 for position in step.positions] + [1] * padding,
                block_tables=step.block_tables + [[self._trash]] * padding,
            )
        )
        if captured.lora is not None:
            captured.lora.fill(step.lora_slots, step.slot_ranks)
        self._copied.record()

    def _capture(self, size: int, inputs_FB: Tensor, attention: AttentionBackend, with_lora: bool) -> _Captured:
        lora = None
        if with_lora and self._lora is not None:
            lora = LoRABatch.static(size, self._lora.max_loras, self._lora.max_lora_rank, self._device)
        attention.plan(AttentionBatch([1] * size, [1] * size, [[self._trash]] * size))
        inputs_FB[2].fill_(self._trash_slot)

        def forward() -> Tensor:
            token_B, position_B, kv_slot_B = inputs_FB
            hidden_BD = self._model(token_B, position_B, None, kv_slot_B, self._caches, attention, lora)
            return self._model.logits(hidden_BD)

        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            forward()  # compiles kernels and makes library handles, which a capture must not
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits_BV = forward()
        return _Captured(graph, inputs_FB, attention, lora, logits_BV)
