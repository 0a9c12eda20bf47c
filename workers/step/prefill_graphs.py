"""Runs steps with prompts as CUDA graphs. Everything between two layers' attention is one graph. So a step of 32
layers takes 33 launches and 32 calls of the attention, whose work depends on the step's mix of lengths.

There are graphs for a set of token counts, each without adapters and with, and with adapters on the experts of a
mixture. A step uses the smallest that fits, and its padding writes to block `trash`. Larger steps run without graphs:
they take longer on the device than their launches do on the host. All graphs share one memory pool, since only one runs
at a time.
"""

# T tokens of the graph · H query heads · D head size (attention) or hidden size

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import TILE_TOKENS, LoRABatch, prompt_tile_tokens
from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
)
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.step.borrowed_memory import borrowed
from lorafleet.workers.step.capture_streams import capture_stream

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

log = logging.getLogger(__name__)

MOST_TOKENS = 2048  # with adapters, launching a step of this many tokens takes as long as the step


@dataclass(frozen=True, slots=True)
class _Piece:
    """A graph that ends at an attention call or at the model's end."""

    graph: torch.cuda.CUDAGraph
    out: Tensor  # queries of the attention that follows, or the model's output; valid until the next piece runs


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    num_tokens: int
    pieces: list[_Piece]
    lora: LoRABatch | None


def graph_token_counts(most: int) -> list[int]:
    """Returns token counts up to MOST_TOKENS. From 512 on they grow by at most a quarter. GEMMs compute whole tiles of
    64 or 128 anyway."""
    most = min(most, MOST_TOKENS)
    counts = {16, 32, 64, 128, 192, 256, *range(384, 1024, 128), *range(1024, MOST_TOKENS + 1, 256), most}
    return sorted(count for count in counts if count <= most)


class PrefillGraphs:
    """All graphs for steps with prompts. The constructor raises what capturing raises."""

    def __init__(
        self,
        model: EngineModel,
        caches: list[KVCache],
        attention: AttentionBackend,
        spec: AttentionSpec,
        inputs: StepInputs,
        token_counts: Sequence[int],
        loras: LoRAModelManager | None,
        *,
        has_fixed_tiles: bool = False,
    ) -> None:
        self._model = model
        self._caches = caches
        self._attention = attention
        self._inputs = inputs
        self._device = spec.device
        self._token_counts = sorted(token_counts, reverse=True)
        self._loras = loras
        self._has_fixed_tiles = has_fixed_tiles
        self._side = capture_stream(spec.device, "prompts")  # one for all captures, as in DecodeGraphs
        # One buffer for the results of all layers, whose heads may differ.
        widths = [layer.num_heads * layer.out_dim for layer in spec.layers]
        self._memory = torch.zeros(max(token_counts) * max(widths), dtype=spec.dtype, device=spec.device)
        self._attended_THD = [
            self._memory[: max(token_counts) * width].view(-1, layer.num_heads, layer.out_dim)
            for layer, width in zip(spec.layers, widths, strict=True)
        ]
        # by number of tokens, whether there are adapters, and whether any is on experts
        self._graphs: dict[tuple[int, bool, bool], PrefillGraph] = {}
        self.capture()

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the graphs of all token counts. Raises what capturing raises."""
        started = time.monotonic()
        self._pool = torch.cuda.graph_pool_handle()
        self._memory.untyped_storage().resize_(self._memory.nbytes)
        for count in self._token_counts:  # largest first, so that the others fit into its memory
            self._graphs[count, False, False] = self._capture(count, None)
            if self._loras is None:
                continue
            tile_tokens = TILE_TOKENS if self._has_fixed_tiles else prompt_tile_tokens(count)
            num_tiles = self._loras.tile_counts(count, tile_tokens)[-1]
            for has_experts in (False, True) if self._model.mixtures() else (False,):
                lora = self._loras.static_batch(count, num_tiles, tile_tokens, takes_experts=has_experts)
                self._graphs[count, True, has_experts] = self._capture(count, lora)
        torch.cuda.empty_cache()
        log.info("captured %d prefill steps as CUDA graphs in %.1f s", len(self._graphs), time.monotonic() - started)

    def release(self) -> None:
        """Drops all graphs and their memory, until capture(). Steps run without graphs meanwhile."""
        torch.cuda.synchronize(self._device)  # a graph's memory must outlive its run
        self._graphs.clear()
        self._memory.untyped_storage().resize_(0)

    def find(self, num_tokens: int, with_lora: bool, with_experts: bool) -> PrefillGraph | None:
        """Returns the smallest graph that fits, or None if none is large enough.

        Args:
            num_tokens: Tokens of the step.
            with_lora: Whether any of them has an adapter.
            with_experts: Whether any has an adapter on experts.
        """
        kind = with_lora, with_experts
        fitting = [key for key in self._graphs if key[0] >= num_tokens and key[1:] == kind]
        return self._graphs[min(fitting)] if fitting else None

    def run(self, prefill: PrefillGraph, batch: AttentionBatch, lora_slots: list[int], slot_ranks: list[int]) -> Tensor:
        """Returns the model's output [T of the step, D], which is valid until the next step.

        The inputs must have been uploaded.

        Args:
            lora_slots: Each token's slot, or BASE_SLOT.
            slot_ranks: LoRAModelManager.ranks, of every slot.
        """
        num_tokens = len(lora_slots)
        if prefill.lora is not None:
            prefill.lora.fill(lora_slots, slot_ranks)
        first, *later = prefill.pieces
        first.graph.replay()
        self._attention.plan(batch)  # on the host, while the first piece runs
        self._inputs.mark_copied()
        out = first.out
        for layer, piece in enumerate(later):
            self._attention.attend(layer, out[:num_tokens], self._attended_THD[layer][:num_tokens])
            piece.graph.replay()
            out = piece.out
        return out[:num_tokens]

    def _capture(self, num_tokens: int, lora: LoRABatch | None) -> PrefillGraph:
        self._inputs.fill_with_padding(num_tokens)
        inputs = self._inputs.tensors(num_tokens)
        torch.cuda.synchronize(self._device)

        def forward(cuts: _Cuts) -> Tensor:
            out_TD: Tensor = self._model(
                inputs.tokens(),
                inputs.position_T,
                inputs.rope_length_T,
                inputs.kv_slot_T,
                self._caches,
                cuts,
                lora,
            )
            return out_TD

        cuts = _Cuts([attended_THD[:num_tokens] for attended_THD in self._attended_THD], self._pool)
        with torch.cuda.stream(self._side):
            forward(cuts)  # compiles kernels and creates library handles, which a capture must not do
            cuts.begin()
            cuts.end(forward(cuts))
        torch.cuda.synchronize(self._device)
        return PrefillGraph(num_tokens, cuts.pieces, lora)


class _Cuts:
    """Replaces the attention while a step is captured. Each call ends one graph and begins the next."""

    def __init__(self, attended_THD: list[Tensor], pool: _POOL_HANDLE) -> None:
        """`attended_THD` has what each layer's attention will have written."""
        self.pieces: list[_Piece] = []
        self._attended_THD = attended_THD
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # as in DecodeGraphs

    def end(self, out: Tensor) -> None:
        assert self._graph is not None
        self._graph.capture_end()
        # A tensor would take the memory away from the pieces that follow, layer by layer.
        self.pieces.append(_Piece(self._graph, borrowed(out)))
        self._graph = None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:  # noqa: ARG002  its own memory
        if self._graph is not None:
            self.end(q_THD)
            self.begin()
        return self._attended_THD[layer]

    def plan(self, batch: AttentionBatch) -> None:  # noqa: ARG002  a capture is of any batch
        raise AssertionError("only the real attention backend plans, when the graphs run")

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> None:  # noqa: ARG002  there is none
        return None
