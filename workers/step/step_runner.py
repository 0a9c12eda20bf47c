"""Runs a planned step on the device: inputs, the model or its CUDA graph, logits. It is the same on every rank and
decides nothing. Everything that depends on requests is in runner.py."""

# T tokens of the step · B rows that sample · D hidden size · V vocabulary · W this rank's part of it

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import (
    BASE_SLOT,
    CHUNK_RANKS,
    PREFILL_TILE_TOKENS,
    PREFILL_TOKENS,
    TILE_TOKENS,
    LoRABatch,
    prompt_tile_tokens,
)
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionBatch, KVCache
from lorafleet.workers.device.host_copy import to_device
from lorafleet.workers.device.sampler import greedy_of_ranks
from lorafleet.workers.device.step_inputs import InputTensors, StepInputs
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.slot_heads import OwnLogits, SlotHeads
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.step.decode_graphs import DecodeGraphs
from lorafleet.workers.step.prefill_graphs import PrefillGraphs

# Number of tokens of each warm-up step, and of its tiles. The LoRA kernels have variants for few, some and many small
# tiles, and one for large tiles.
WARM_UP_BEYOND_GRAPHS = ((2049, PREFILL_TILE_TOKENS),)
WARM_UP_WITHOUT_GRAPHS = (
    (4, TILE_TOKENS),
    (400, TILE_TOKENS),
    (800, TILE_TOKENS),
    (PREFILL_TOKENS, PREFILL_TILE_TOKENS),
)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The output of a step. The logits are valid until the next step."""

    # None if the plan is greedy: the tokens are then in StepInputs.sampled_B. V is the largest vocabulary among the
    # rows, at least the base's.
    sampled_BV: Tensor | None
    hidden_TD: Tensor  # of all tokens; the plan says which rows sample


class StepRunner:
    def __init__(
        self,
        model: DecoderModel,
        attention: AttentionBackend,
        caches: list[KVCache],
        inputs: StepInputs,
        device: torch.device,
        slots: LoRAModelManager | None,
        decode_graphs: DecodeGraphs | None,
        prefill_graphs: PrefillGraphs | None,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.device = device
        self._attention = attention
        self.caches = caches
        self._slots = slots
        self.decode_graphs = decode_graphs
        self._prefill_graphs = prefill_graphs

    @torch.inference_mode()
    def run(self, plan: StepPlan, score: Callable[[int, Tensor], None] = lambda _span, _logits_TV: None) -> StepLogits:
        """Queues the step and waits for nothing.

        `score` takes the logits [count, V] of each span of plan.prompts as soon as they are queued. They are not
        stored, since all spans together may be larger than the memory.
        """
        decoded = self._decode(plan)
        if decoded is not None:  # the graph has chosen the base's greedy tokens too
            return StepLogits(self._sampled(*decoded, plan, plan.slots, chosen=True), decoded[0])
        hidden_TD = self._forward(plan)
        heads = self._heads(plan.slots)
        slots_T = plan.lora_slots if heads is not None else [BASE_SLOT] * plan.num_tokens
        for span, (first, count) in enumerate(plan.prompts):
            span_TD = hidden_TD[first : first + count]
            logits_TW = self.model.logits(span_TD)
            owned = heads.logits(span_TD, logits_TW, slots_T[first : first + count]) if heads is not None else []
            score(span, self._gathered(logits_TW, owned))
        if not plan.sampling:
            return StepLogits(None, hidden_TD)
        hidden_BD = hidden_TD[to_device(plan.sampling, torch.int64, self.device)]
        slots = [slots_T[row] for row in plan.sampling]
        sampled_BV = self._sampled(hidden_BD, self.model.logits(hidden_BD), plan, slots, chosen=False)
        return StepLogits(sampled_BV, hidden_TD)

    def _sampled(
        self, hidden_BD: Tensor, logits_BW: Tensor, plan: StepPlan, slots: list[int], *, chosen: bool
    ) -> Tensor | None:
        """Returns the tensor for StepLogits.sampled_BV. If `chosen`, the base's greedy tokens are already in
        StepInputs.sampled_B."""
        heads = self._heads(slots)
        owned = heads.logits(hidden_BD, logits_BW, slots) if heads is not None else []
        if not plan.is_greedy:
            return self._gathered(logits_BW, owned)
        token_B = self.inputs.sampled_B[: len(slots)]
        if not chosen:
            token_B.copy_(greedy_of_ranks(logits_BW, self.model.group))
        if heads is not None:
            heads.choose(owned, token_B)
        return None

    def _gathered(self, logits_BW: Tensor, owned: list[OwnLogits]) -> Tensor:
        logits_BV = self.model.gather_logits(logits_BW)
        return self._slots.heads.gather(owned, logits_BV) if self._slots is not None else logits_BV

    def _heads(self, slots: list[int]) -> SlotHeads | None:
        """Returns the slots' heads, or None if no row has a head of its own."""
        return self._slots.heads if self._slots is not None and self._slots.heads.are_used(slots) else None

    def follow(self, plan: StepPlan) -> None:
        """Runs a step on a rank that does not sample. The tokens that rank 0 chose come from there, see share()."""
        self.run(plan)
        if not plan.is_greedy:
            self.share(len(plan.sampling))

    @torch.inference_mode()
    def share(self, num_rows: int) -> None:
        """Sends rank 0's sampled_B to all ranks, which read the next step's tokens from it."""
        self.model.group.broadcast(self.inputs.sampled_B[:num_rows])

    def close(self) -> None:
        """Releases the CUDA graphs. They hold NCCL's communicator, which cannot be destroyed before them."""
        self.decode_graphs = self._prefill_graphs = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _decode(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Runs a step of decodes alone by a captured graph. Returns hidden states and logits, or None if no graph
        fits."""
        if self.decode_graphs is None or not plan.is_decode:
            return None
        graph = self.decode_graphs.find(plan.slots)
        if graph is None:
            return None
        self.inputs.upload(plan.fields_FT, graph.num_rows)
        return self.decode_graphs.run(graph, plan.attention, plan.slots, plan.slot_ranks)

    def _forward(self, plan: StepPlan) -> Tensor:
        """Returns the hidden states [T, D] of all tokens."""
        adds_kronecker = self._slots is not None and self._slots.adds_kronecker(plan.slots)
        # These graphs do not launch Kronecker products, which hardly any step with prompts needs.
        if self._prefill_graphs is not None and not adds_kronecker:
            uses_lora = any(slot != BASE_SLOT for slot in plan.slots)
            graph = self._prefill_graphs.find(plan.num_tokens, uses_lora)
            if graph is not None:
                self.inputs.upload(plan.fields_FT, graph.num_tokens)
                return self._prefill_graphs.run(graph, plan.attention, plan.lora_slots, plan.slot_ranks)
        self.inputs.upload(plan.fields_FT, plan.num_tokens)
        self._attention.plan(plan.attention)
        self.inputs.mark_copied()
        inputs = self.inputs.tensors(plan.num_tokens)
        lora = None
        if self._slots is not None:
            max_rank = _rank_class(max((plan.slot_ranks[slot] for slot in plan.slots if slot != BASE_SLOT), default=0))
            if adds_kronecker:
                max_rank = self._slots.max_rank  # the variant that the graphs' capture has compiled for so many tokens
            tile_tokens = TILE_TOKENS if plan.is_decode else prompt_tile_tokens(plan.num_tokens)
            lora = LoRABatch.build(plan.lora_slots, self._slots.tables, max_rank, tile_tokens)
        return self._run_model(inputs, lora)

    def _run_model(self, inputs: InputTensors, lora: LoRABatch | None) -> Tensor:
        hidden_TD: Tensor = self.model(
            inputs.tokens(),
            inputs.position_T,
            inputs.rope_length_T,
            inputs.kv_slot_T,
            self.caches,
            self._attention,
            lora,
        )
        return hidden_TD

    @torch.inference_mode()
    def warm_up(self, most_tokens: int, max_lora_rank: int) -> None:
        """Compiles the LoRA kernels that steps without a graph may need, for every class of ranks, so that no request
        waits for a compiler. The tokens are padding, and the adapters are empty slots."""
        assert self._slots is not None
        block_size = self.caches[0].k_NPGD.shape[1]
        steps = WARM_UP_WITHOUT_GRAPHS if self._prefill_graphs is None else WARM_UP_BEYOND_GRAPHS
        for count, tile_tokens in steps:
            if count > most_tokens:
                continue
            self.inputs.fill_with_padding(count)
            self._attention.plan(AttentionBatch([count], [count], [[0] * -(-count // block_size)]))
            self.inputs.mark_copied()
            inputs = self.inputs.tensors(count)
            for max_rank in sorted({_rank_class(rank) for rank in range(1, max_lora_rank + 1)}):
                lora = LoRABatch.build([0] * count, self._slots.tables, max_rank, tile_tokens, any_slots=True)
                self._run_model(inputs, lora)
        self._warm_up_kronecker()
        torch.cuda.synchronize(self.device)

    def _warm_up_kronecker(self) -> None:
        """Launches the one kernel that no such step has launched. It is the same for all linears."""
        assert self._slots is not None
        from lorafleet.kernels.extras.kronecker_triton import apply_kronecker_triton  # triton is optional on a CPU

        lora = LoRABatch.build([0], self._slots.tables)
        (_, linear), *_ = self.model.packed_linears()
        assert lora is not None and linear.lora is not None
        dtype = self.model.embed_tokens.weight.dtype
        x_TD = torch.zeros(1, linear.in_features, dtype=dtype, device=self.device)
        apply_kronecker_triton(x_TD, x_TD.new_zeros(1, sum(linear.out_features)), linear.lora, lora)


def _rank_class(rank: int) -> int:
    """Returns the class of the kernel variant. There is a variant for each power of two that a step's largest rank may
    have."""
    return max(CHUNK_RANKS, 1 << (rank - 1).bit_length())
