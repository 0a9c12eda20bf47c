"""Captures decode steps as CUDA graphs, and replays them. decode_graphs.py decides which are captured, and when.

Attention plans and adapter tables are refilled in place before a replay. A graph begins by reading the last step's
tokens. It ends by writing its own, chosen greedily, where the next one reads them. Rows without a sequence write to
block `trash` and are ignored. Graphs with adapters may leave some of the GPU's SMs to the LoRA kernels
(kernels/lora/sm_split.py). Those without may compute the linears, mixtures and delta nets by kernels of their own
(workers/step/own_linears.py, few_token_kernels.py).
All graphs share one memory pool, since only one runs at a time.
"""

# B rows of the graph · W this rank's part of the vocabulary

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.sm_split import HIGH_PRIORITY, UNSPLIT, GEMMs, SMSplit, split_for
from lorafleet.kernels.quant.base_gemms import gemms_of
from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    DraftRows,
    KVCache,
    ShortensSequences,
)
from lorafleet.workers.device.sampler import greedy_of_ranks
from lorafleet.workers.device.state_cache import StateCache, StepStates
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import Corrections, UnreadInputs
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.step.borrowed_memory import borrowed
from lorafleet.workers.step.capture_streams import capture_stream
from lorafleet.workers.step.drafted_sizes import DraftShape
from lorafleet.workers.step.few_token_kernels import few_token_kernels
from lorafleet.workers.step.instantiation import Instantiation
from lorafleet.workers.step.interruption import InterruptibleAttention, IsInterrupted, never
from lorafleet.workers.step.own_linears import own_linears


class DecodeKey(NamedTuple):
    """The kind of a decode graph."""

    num_rows: int  # Number of tokens that the graph computes.
    num_tiles: int  # Number of LoRA tiles that it has room for; 0 without adapters.
    takes_rare: bool = False  # Whether it also launches what hardly any adapter has (ExtraTables.has_rare).
    takes_experts: bool = False  # Whether it also launches what adapters on experts need.
    drafts: DraftShape | None = None  # None if each row is a sequence of its own.

    @property
    def num_seqs(self) -> int:
        """Number of sequences for which the attention has room."""
        return self.num_rows if self.drafts is None else self.drafts.num_seqs


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured decode step. Its outputs, like its tokens, are valid until the next step."""

    key: DecodeKey
    graph: torch.cuda.CUDAGraph
    attention: AttentionBackend
    lora: LoRABatch | None
    states: StepStates | None
    hidden_BD: Tensor  # The model's output.
    logits_BW: Tensor  # EngineModel.logits of hidden_BD.


class DecodeCapture:
    """Captures and replays decode steps. `trash` is a KV block that no sequence is ever given."""

    def __init__(
        self,
        model: EngineModel,
        caches: list[KVCache],
        states: StateCache | None,
        attention: AttentionBackend,
        inputs: StepInputs,
        trash: int,
        loras: LoRAModelManager | None,
        max_context: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._caches = caches
        self._states = states
        self._attention = attention
        self._backends: dict[tuple[int, DraftShape | None], AttentionBackend] = {}  # by number of rows
        self._device = device
        self._inputs = inputs
        self._trash_table = array("i", [trash])
        self._loras = loras
        self._max_context = max_context
        self._pool = torch.cuda.graph_pool_handle()
        # All captures share these streams, two for each priority, since the allocator reserves memory, and cuBLAS its
        # workspace, for each stream.
        self._streams = {
            (use, priority): capture_stream(device, use, priority)
            for use in ("step", "lora")
            for priority in (0, HIGH_PRIORITY)
        }
        self._gemms = split_gemms(model)
        self._instantiation = Instantiation[DecodeKey, DecodeGraph](device)

    @torch.inference_mode()
    def capture(self, key: DecodeKey, is_interrupted: IsInterrupted = never) -> DecodeGraph | None:
        """Captures a graph, or returns None if the attention has none. Raises what capturing raises, and
        WorkInterrupted soon after is_interrupted() has become True.

        A step may be in flight. Its inputs and its tokens survive the capture: the next step reads the tokens, and
        drafts are compared with the inputs once masks have arrived.
        """
        if key in self._instantiation:
            return self._instantiation.finish(key, is_interrupted)
        backend = self._backend(key)
        if backend is None:
            return None
        in_flight, stream = self._inputs.block.clone(), torch.cuda.current_stream(self._device)
        try:
            return self._capture(key, backend, self._lora_batch(key), is_interrupted)
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own
            # The step before the capture ran on another stream. It must not write its tokens after this copy, nor run
            # beside the next step.
            torch.cuda.synchronize(self._device)
            self._inputs.block.copy_(in_flight)

    def forget(self) -> None:
        """Forgets the attention's backends, after it has been replaced. Graphs that were captured may be used on."""
        torch.cuda.synchronize(self._device)  # a graph's memory must outlive its run
        self._instantiation.forget()
        self._backends = {}
        self._pool = torch.cuda.graph_pool_handle()

    def _backend(self, key: DecodeKey) -> AttentionBackend | None:
        """Returns the attention of all graphs of this shape, or None if there is none."""
        shape = key.num_rows, key.drafts
        if shape not in self._backends:
            drafts = () if key.drafts is None else (DraftRows(key.drafts.most_rows, key.num_rows),)
            backend = self._attention.for_graph(key.num_seqs, self._max_context, *drafts)
            if backend is None:
                return None
            self._backends[shape] = backend
        return self._backends[shape]

    def _lora_batch(self, key: DecodeKey) -> LoRABatch | None:
        if key.num_tiles == 0:
            return None
        assert self._loras is not None
        lora = self._loras.static_batch(
            key.num_rows, key.num_tiles, takes_rare=key.takes_rare, takes_experts=key.takes_experts
        )
        split = UNSPLIT  # no split was measured with Kronecker products
        if self._gemms is not None and not key.takes_rare:
            split = split_for(self._device, key.num_rows, key.num_tiles, self._loras.max_rank, self._gemms)
        self._run_beside(lora, split)
        return lora

    def _run_beside(self, lora: LoRABatch, split: SMSplit) -> None:
        lora.run_beside(split, self._streams["lora", split.lora_priority])

    def fill(self, decode: DecodeGraph, plan: StepPlan, unread: UnreadInputs | None = None) -> None:
        """Queues the copies of what the graph reads besides the last step's tokens, and its correction by what the plan
        lacks."""
        self._inputs.upload(plan.fields_FT, decode.key.num_rows)
        batch, num_padded = plan.attention, decode.key.num_seqs - len(plan.slots)
        query_len = 1 if decode.key.drafts is None else 0  # in a graph with drafts, other sequences may need the rows
        decode.attention.plan(
            AttentionBatch(
                query_lens=batch.query_lens + [query_len] * num_padded,
                context_lens=batch.context_lens + [1] * num_padded,
                block_tables=[*batch.block_tables, *([self._trash_table] * num_padded)],
                most_shorter=0 if unread is None else unread.most_short,
            )
        )
        if decode.lora is not None:
            decode.lora.fill(plan.row_slots, plan.slot_ranks)
        if decode.states is not None and self._states is not None:
            self._states.refill(decode.states, plan)
        if unread is not None:
            self._correct(decode, plan, unread)
        self._inputs.mark_copied()

    def _correct(self, decode: DecodeGraph, plan: StepPlan, unread: UnreadInputs) -> None:
        corrections = None
        if unread.short_B is not None:
            # A check of the protocol would take 0.1 ms.
            cast(ShortensSequences, decode.attention).shorten(unread.short_B)
            corrections = Corrections(plan, self._caches[0].k_NPGD.shape[1], unread.most_short, self._device)
            slot_N = corrections.known_state_slots(unread.short_B)
            if slot_N is not None and decode.states is not None:
                decode.states.batch.correct(slot_N, len(plan.slots))
        self._inputs.correct(unread, corrections, decode.key.num_rows)

    def replay(self, decode: DecodeGraph, num_rows: int) -> tuple[Tensor, Tensor]:
        """Launches the graph, which has been filled. Returns the model's output and its EngineModel.logits, of the
        step's rows. Greedy tokens are in StepInputs.sampled_B."""
        decode.graph.replay()
        return decode.hidden_BD[:num_rows], decode.logits_BW[:num_rows]

    def _capture(
        self, key: DecodeKey, attention: AttentionBackend, lora: LoRABatch | None, is_interrupted: IsInterrupted
    ) -> DecodeGraph:
        size, num_seqs = key.num_rows, key.num_seqs
        attention.plan(AttentionBatch([1] * num_seqs, [1] * num_seqs, [self._trash_table] * num_seqs))
        self._inputs.fill_with_padding(size)
        inputs = self._inputs.tensors(size)
        states = None
        if self._states is not None:
            states = self._states.of_captured(size, num_seqs, has_drafts=key.drafts is not None)
        interruptible = InterruptibleAttention(attention, is_interrupted)

        def forward() -> tuple[Tensor, Tensor]:
            hidden_BD: Tensor = self._model(
                inputs.tokens(),
                inputs.position_T,
                inputs.rope_length_T,
                inputs.kv_slot_T,
                self._caches,
                interruptible,
                lora,
                states,
            )
            # The logits stay in the model's dtype. Finding the largest needs no float32, and a copy takes 100 us at
            # 256 rows.
            logits_BW = self._model.logits(hidden_BD)
            self._inputs.sampled_B[:size].copy_(greedy_of_ranks(logits_BW, self._model.group))
            return hidden_BD, logits_BW

        stream = self._streams["step", 0 if lora is None else lora.split.gemm_priority]
        with self._without_adapters(key) if lora is None else nullcontext():
            # The inputs are filled, and counters of few_token_kernels.py cleared, on another stream.
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(stream):
                forward()  # compiles kernels and creates library handles, which a capture must not do
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            # The capture is of this thread only, since NCCL's thread queries events meanwhile, which would otherwise
            # break it. torch.cuda.graph would give the free memory of steps back to the driver, and they would wait
            # until they have it again.
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    hidden_BD, logits_BW = forward()
                finally:
                    graph.capture_end()
        captured = DecodeGraph(key, graph, attention, lora, states, borrowed(hidden_BD), borrowed(logits_BW))
        self._instantiation.begin(key, captured, graph.instantiate)
        return self._instantiation.finish(key, is_interrupted)

    @contextmanager
    def _without_adapters(self, key: DecodeKey) -> Iterator[None]:
        """Lets the model compute a step without adapters by its own kernels in the block."""
        few_tokens = few_token_kernels(self._model, key.num_rows, has_drafts=key.drafts is not None)
        with few_tokens, own_linears(self._model, key.num_rows):
            yield


def split_gemms(model: EngineModel) -> GEMMs | None:
    """Returns the GEMMs of the model's linears if the splits of the GPU were measured with a model like this one: its
    linears are whole and of one kind, and it has no experts."""
    if model.shard.size > 1 or model.mixtures():
        return None
    return gemms_of(linear.weight for _, linear in model.packed_linears())
