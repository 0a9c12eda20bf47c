"""Describes what a step computes, for every rank that computes it: rows of numbers, without requests, parameters or
texts.

Rank 0 makes the plan from the scheduler's chunks (planner.py). The others receive it by message (workers/tp/).
"""

# T tokens of the step · F fields of a token · B sequences

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.attention.attention_backend import AttentionBatch

FIELDS = 5  # token, source, position, rope length, KV slot
SOURCE, POSITION = 1, 2  # rows of StepPlan.fields_FT
Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step."""

    fields_FT: Rows  # As in StepInputs.
    attention: AttentionBatch
    slots: list[int]  # Slot of each sequence, or BASE_SLOT if its tokens in the step use no adapter.
    base_lens: list[int]  # Number of each sequence's tokens in the step before its adapter begins to work.
    sampling: list[int]  # Rows of the step whose next token is chosen: a sequence's last one, and those of its drafts.
    is_greedy: bool  # All of these tokens have the largest logits, and nobody wants to see logits.
    # (first row, count) of rows that predict prompt tokens whose logprobs are requested.
    prompts: list[tuple[int, int]]
    slot_ranks: list[int]  # LoRAModelManager.ranks, of every slot.
    # Chunks at the front that have one token and sample the next one. Known on rank 0 only.
    num_decodes: int = 0
    num_plain: int = 0  # Decodes before the first whose sequence is not plain (Sequence.is_plain).
    # Slot of each sequence's state. Empty if the model has no recurrent layers.
    state_slots: list[int] = field(default_factory=list)
    # (from, to) of states that are copied before the step, out of snapshots, and after it, into snapshots.
    resumed_states: list[tuple[int, int]] = field(default_factory=list)
    state_snapshots: list[tuple[int, int]] = field(default_factory=list)
    # Slot to which the state behind each token is written too, or NOT_KEPT. Empty if no sequence has drafts.
    kept_states: list[int] = field(default_factory=list)
    # Sequence.state_ring of each sequence. Empty if no sequence has one.
    state_rings: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.fields_FT.shape[1]

    @property
    def begins(self) -> list[bool]:
        """Whether each sequence begins with this step, so that the states of its recurrent layers are zero before."""
        lens = zip(self.attention.query_lens, self.attention.context_lens, strict=True)
        return [count == end for count, end in lens]

    @property
    def is_decode(self) -> bool:
        """Whether each sequence computes one token and needs the next. None has drafts."""
        return len(self.sampling) == len(self.slots) == self.num_tokens and not self.prompts

    @property
    def has_decodes_only(self) -> bool:
        """Whether the next token of every row is needed: those of decodes, and of the drafts behind them."""
        return len(self.sampling) == self.num_tokens and not self.prompts

    @property
    def shape(self) -> StepShape:
        if self.is_decode:
            adapted = len(self.slots) - self.slots.count(BASE_SLOT)
            return StepShape("decode", len(self.slots), self.num_tokens, adapted)
        spans = zip(self.slots, self.base_lens, self.attention.query_lens, strict=True)
        adapted = sum(count - num_base for slot, num_base, count in spans if slot != BASE_SLOT)
        if self.has_decodes_only:
            return StepShape("decode", len(self.slots), self.num_tokens, adapted)
        chunks = list(zip(self.attention.query_lens, self.attention.context_lens, strict=True))
        return StepShape(
            "prefill",
            len(self.slots),
            self.num_tokens,
            adapted,
            decode_positions=sum(end for count, end in chunks if count == 1),
            prompts=tuple((count, end) for count, end in chunks if count > 1),
        )

    @property
    def row_slots(self) -> list[int]:
        """As lora_slots, for a step that has_decodes_only."""
        return self.slots if self.is_decode else self.lora_slots

    @property
    def lora_slots(self) -> list[int]:
        """The slot of each token, or BASE_SLOT."""
        slots: list[int] = []
        for slot, num_base, count in zip(self.slots, self.base_lens, self.attention.query_lens, strict=True):
            slots += [BASE_SLOT] * num_base + [slot] * (count - num_base)
        return slots
