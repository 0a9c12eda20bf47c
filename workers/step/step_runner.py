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
from lorafleet.workers.device.routed_experts import RoutedExperts
from lorafleet.workers.device.sampler import greedy_of_ranks
from lorafleet.workers.device.state_cache import StateCache, StepStates
from lorafleet.workers.device.step_inputs import InputTensors, StepInputs
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.models.slot_heads import OwnLogits, SlotHeads
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.step.decode_capture import DecodeGraph
from lorafleet.workers.step.decode_graphs import DecodeGraphs
from lorafleet.workers.step.late_work import LateWork
from lorafleet.workers.step.prefill_graphs import MOST_TOKENS, PrefillGraphs
from lorafleet.workers.step.reserved_memory import reserve_logits
from lorafleet.workers.step.single_tokens import single_tokens

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
        model: EngineModel,
        attention: AttentionBackend,
        caches: list[KVCache],
        states: StateCache | None,
        inputs: StepInputs,
        device: torch.device,
        slots: LoRAModelManager | None,
        decode_graphs: DecodeGraphs | None,
        prefill_graphs: PrefillGraphs | None,
        late: LateWork,
        routed: RoutedExperts | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.device = device
        self._attention = attention
        self.caches = caches
        self.states = states
        self._slots = slots
        self.decode_graphs = decode_graphs
        self._prefill_graphs = prefill_graphs
        self.late = late
        self.routed = routed  # None if the experts of tokens are not recorded
        # For the same bits in every batch, a CPU computes each token in a forward pass of its own (single_tokens.py).
        # On a GPU the LoRA kernels have one variant, and tiles of one size.
        self._by_token = batch_invariant and device.type == "cpu"
        self._has_fixed_tiles = batch_invariant
        self._prepared: tuple[StepPlan, DecodeGraph] | None = None  # a step that prepare() has filled the graph for

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        score: Callable[[int, Tensor], None] = lambda _span, _logits_TV: None,
        unread: UnreadInputs | None = None,
        check: Callable[[], None] | None = None,
    ) -> StepLogits:
        """Queues the step, with the copies of states before and after it. Waits for nothing if a captured graph runs
        it, or if the plan lacks nothing.

        `score` takes the logits [count, V] of each span of plan.prompts as soon as they are queued. They are not
        stored, since all spans together may be larger than the memory.

        Args:
            unread: What the plan lacks, if it lacks something.
            check: As in UnreadInputs.with_known.
        """
        if unread is not None and not self._fill_unread(plan, unread):
            plan = unread.with_known(plan, self.inputs.first_known, self._block_size, check)
        if self.states is not None:
            self.states.copy(plan.resumed_states)
        logits = self._run(plan, score)
        if self.states is not None:
            self.states.copy(plan.state_snapshots)
        return logits

    def _run(self, plan: StepPlan, score: Callable[[int, Tensor], None]) -> StepLogits:
        decoded = self._decode(plan)
        if decoded is not None:  # the graph has chosen the base's greedy tokens too
            return StepLogits(self._sampled(*decoded, plan, plan.row_slots, chosen=True), decoded[0])
        hidden_TD = self._forward_tokens(plan) if self._by_token else self._forward(plan)
        heads = self._heads(plan.slots)
        slots_T = plan.lora_slots if heads is not None else [BASE_SLOT] * plan.num_tokens
        for span, (first, count) in enumerate(plan.prompts):
            span_TD = hidden_TD[first : first + count]
            logits_TW = self._logits(span_TD)
            owned = heads.logits(span_TD, logits_TW, slots_T[first : first + count]) if heads is not None else []
            score(span, self._gathered(logits_TW, owned))
        if not plan.sampling:
            return StepLogits(None, hidden_TD)
        hidden_BD = hidden_TD[to_device(plan.sampling, torch.int64, self.device)]
        slots = [slots_T[row] for row in plan.sampling]
        sampled_BV = self._sampled(hidden_BD, self._logits(hidden_BD), plan, slots, chosen=False)
        return StepLogits(sampled_BV, hidden_TD)

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        if self._by_token:  # copies, since a row's own address may be aligned differently
            return torch.cat([self.model.logits(row_1D.clone()) for row_1D in hidden_BD.split(1)])
        return self.model.logits(hidden_BD)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan, unread: UnreadInputs | None = None) -> None:
        """Queues what a step of decodes reads besides the last step's tokens, if a captured graph fits. run() then only
        launches the graph. The tokens of the step before need not be chosen yet.

        Args:
            unread: What the plan lacks, if it lacks something. run() gets it with its tokens.
        """
        self._fill(plan, unread)

    def _fill_unread(self, plan: StepPlan, unread: UnreadInputs) -> bool:
        """Fills a captured graph for a step whose plan lacks something. Returns False if no graph can run it."""
        if self._prepared is not None and self._prepared[0] is plan:
            self.inputs.fill_in(unread)
        else:
            self._fill(plan, unread)
        return self._prepared is not None

    def _fill(self, plan: StepPlan, unread: UnreadInputs | None) -> None:
        self._prepared = None
        if self.decode_graphs is None or not plan.has_decodes_only:
            return
        may_shorten = unread is not None and unread.short_B is not None
        graph = self.decode_graphs.find(plan.row_slots, plan.attention.context_lens, may_shorten=may_shorten)
        if graph is not None:
            self.decode_graphs.fill(graph, plan, unread)
            self._prepared = plan, graph

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

    @torch.inference_mode()
    def share(self, num_rows: int) -> None:
        """Sends rank 0's sampled_B to all ranks, which read the next step's tokens from it."""
        self.model.group.broadcast(self.inputs.sampled_B[:num_rows])

    def release_graphs(self) -> None:
        """Frees the CUDA graphs and their memory, until capture_graphs()."""
        self._prepared = None
        if self.decode_graphs is not None:
            self.decode_graphs.restart()
        if self._prefill_graphs is not None:
            self._prefill_graphs.release()

    def capture_graphs(self) -> None:
        """Captures the CUDA graphs of a start again. Raises what capturing raises."""
        if self.decode_graphs is not None:
            self.decode_graphs.capture_first()
        if self._prefill_graphs is not None:
            self._prefill_graphs.capture()
        reserve_logits(self.model, len(self.inputs.sampled_B), self.device)

    def close(self) -> None:
        """Releases the CUDA graphs. They hold NCCL's communicator, which cannot be destroyed before them."""
        self.late.close()
        self.decode_graphs = self._prefill_graphs = self._prepared = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _decode(self, plan: StepPlan) -> tuple[Tensor, Tensor] | None:
        """Runs a step of decodes and their drafts alone by a captured graph. Returns hidden states and logits, or None
        if no graph fits."""
        if self._prepared is None or self._prepared[0] is not plan:
            self.prepare(plan)
        if self.decode_graphs is None or self._prepared is None:
            return None
        (_, graph), self._prepared = self._prepared, None
        return self.decode_graphs.replay(graph, plan.num_tokens)

    def _forward_tokens(self, plan: StepPlan) -> Tensor:
        hidden_TD = torch.cat([self._forward(token) for token in single_tokens(plan, self.inputs.first_known)])
        self.inputs.upload(plan.fields_FT, plan.num_tokens)  # The step's drafts are compared with what it draws.
        return hidden_TD

    @property
    def _block_size(self) -> int:
        return self.caches[0].k_NPGD.shape[1]

    def _forward(self, plan: StepPlan) -> Tensor:
        """Returns the hidden states [T, D] of all tokens."""
        has_rare = self._slots is not None and self._slots.has_rare(plan.slots)
        # These graphs do not launch what hardly any step with prompts needs.
        if self._prefill_graphs is not None and not has_rare:
            uses_lora = any(slot != BASE_SLOT for slot in plan.slots)
            has_experts = self._slots is not None and self._slots.has_experts(plan.slots)
            graph = self._prefill_graphs.find(plan.num_tokens, uses_lora, has_experts)
            if graph is not None:
                self.inputs.upload(plan.fields_FT, graph.num_tokens)
                return self._prefill_graphs.run(graph, plan.attention, plan.lora_slots, plan.slot_ranks)
        self.inputs.upload(plan.fields_FT, plan.num_tokens)
        self._attention.plan(plan.attention)
        states = None if self.states is None else self.states.of_step(plan)
        self.inputs.mark_copied()
        inputs = self.inputs.tensors(plan.num_tokens)
        lora = None
        if self._slots is not None:
            max_rank = _rank_class(max((plan.slot_ranks[slot] for slot in plan.slots if slot != BASE_SLOT), default=0))
            if has_rare or self._has_fixed_tiles:
                max_rank = self._slots.max_rank  # the variant that the graphs' capture has compiled for so many tokens
            is_small = plan.is_decode or self._has_fixed_tiles
            tile_tokens = TILE_TOKENS if is_small else prompt_tile_tokens(plan.num_tokens)
            lora = LoRABatch.build(plan.lora_slots, self._slots.tables, max_rank, tile_tokens)
        return self._run_model(inputs, lora, states)

    def _run_model(self, inputs: InputTensors, lora: LoRABatch | None, states: StepStates | None) -> Tensor:
        hidden_TD: Tensor = self.model(
            inputs.tokens(),
            inputs.position_T,
            inputs.rope_length_T,
            inputs.kv_slot_T,
            self.caches,
            self._attention,
            lora,
            states,
        )
        return hidden_TD

    @torch.inference_mode()
    def warm_up(self, most_tokens: int, max_lora_rank: int) -> None:
        """Compiles the LoRA kernels that steps without a graph may need, for every class of ranks, so that no request
        waits for a compiler. The tokens are padding, and the adapters are empty slots."""
        assert self._slots is not None
        steps = WARM_UP_WITHOUT_GRAPHS if self._prefill_graphs is None else WARM_UP_BEYOND_GRAPHS
        in_graphs = 0 if self._prefill_graphs is None else MOST_TOKENS
        for count, usual_tokens in (*steps, *_warm_up_of_mixtures(self.model, in_graphs)):
            if count > most_tokens:
                continue
            tile_tokens = TILE_TOKENS if self._has_fixed_tiles else usual_tokens
            inputs = self._padding(count)
            states = None if self.states is None else self.states.of_padding([count])
            for max_rank in sorted({_rank_class(rank) for rank in range(1, max_lora_rank + 1)}):
                lora = LoRABatch.build([0] * count, self._slots.tables, max_rank, tile_tokens, any_slots=True)
                self._run_model(inputs, lora, states)
        if self.states is not None and self.states.draft_slots:  # the kernels that keep states behind drafts
            self._run_model(self._padding(2), None, self.states.of_padding([2], has_drafts=True))
        _warm_up_kronecker(self.model, self._slots)
        torch.cuda.synchronize(self.device)

    def _padding(self, count: int) -> InputTensors:
        """Plans a step of so many tokens that no sequence has, and returns its inputs."""
        self.inputs.fill_with_padding(count)
        self._attention.plan(AttentionBatch([count], [count], [[0] * -(-count // self._block_size)]))
        self.inputs.mark_copied()
        return self.inputs.tensors(count)


def _warm_up_of_mixtures(model: EngineModel, in_graphs: int) -> list[tuple[int, int]]:
    """Returns a step for each variant of a mixture's kernels that no graph has compiled. The graphs have up to
    `in_graphs` tokens."""
    from lorafleet.kernels.moe.moe_triton import first_tokens  # triton is optional on a CPU

    mixtures = [mixture for _, mixture in model.mixtures()]
    experts = {(own.experts.count, own.experts.rule.per_token, own.are_tiled) for own in mixtures}
    counts = sorted({count for sizes in experts for count in first_tokens(*sizes) if count > in_graphs})
    return [(count, prompt_tile_tokens(count)) for count in counts]


def _warm_up_kronecker(model: EngineModel, slots: LoRAModelManager) -> None:
    """Launches the one kernel that no step of a warm-up has launched. It is the same for all linears."""
    from lorafleet.kernels.extras.kronecker_triton import apply_kronecker_triton  # triton is optional on a CPU

    lora = LoRABatch.build([0], slots.tables)
    (_, linear), *_ = model.packed_linears()
    assert lora is not None and linear.lora is not None
    weight = model.embed_tokens.weight
    x_TD = torch.zeros(1, linear.in_features, dtype=weight.dtype, device=weight.device)
    apply_kronecker_triton(x_TD, x_TD.new_zeros(1, sum(linear.out_features)), linear.lora, lora)


def _rank_class(rank: int) -> int:
    """Returns the class of the kernel variant. There is a variant for each power of two that a step's largest rank may
    have."""
    return max(CHUNK_RANKS, 1 << (rank - 1).bit_length())
