"""What a step computes, for every rank that computes it: rows of numbers, without requests, parameters or texts.

Rank 0 makes it of the scheduler's chunks (planner.py), the others get it by message (workers/tp/).
"""

# T tokens of the step · F fields of a token · B sequences

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.attention.attention_backend import AttentionBatch

FIELDS = 5  # token, source, position, rope length, KV slot
Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """fields_FT: as StepInputs has them. slots: of each sequence, or BASE_SLOT where the step's tokens of it use no
    adapter. base_lens: how many of its tokens in the step come before its adapter begins to work. sampling: the rows of
    the step whose next token is chosen. is_greedy: all of these tokens are the largest logits' and nobody wants to see
    logits. prompts: (first row, count) of those that predict prompt tokens, where asked for. slot_ranks:
    LoRAModelManager.ranks, of every slot.
    """

    fields_FT: Rows
    attention: AttentionBatch
    slots: list[int]
    base_lens: list[int]
    sampling: list[int]
    is_greedy: bool
    prompts: list[tuple[int, int]]
    slot_ranks: list[int]

    @property
    def num_tokens(self) -> int:
        return self.fields_FT.shape[1]

    @property
    def is_decode(self) -> bool:
        """Every sequence computes one token and wants the next."""
        return len(self.sampling) == len(self.slots) == self.num_tokens and not self.prompts

    @property
    def shape(self) -> StepShape:
        if self.is_decode:
            adapted = len(self.slots) - self.slots.count(BASE_SLOT)
            return StepShape("decode", len(self.slots), self.num_tokens, adapted)
        spans = zip(self.slots, self.base_lens, self.attention.query_lens, strict=True)
        adapted = sum(count - num_base for slot, num_base, count in spans if slot != BASE_SLOT)
        return StepShape("prefill", len(self.slots), self.num_tokens, adapted)

    @property
    def lora_slots(self) -> list[int]:
        """Of each token, or BASE_SLOT."""
        slots: list[int] = []
        for slot, num_base, count in zip(self.slots, self.base_lens, self.attention.query_lens, strict=True):
            slots += [BASE_SLOT] * num_base + [slot] * (count - num_base)
        return slots
