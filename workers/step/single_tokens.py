"""Divides a step into steps of one token each, for batch invariance on a CPU.

torch's operators on a CPU choose algorithms by the shapes of their inputs, so a token's bits depend on how many tokens
are computed with it. A step of one token has shapes that depend on nothing but the token's position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import SOURCE, StepPlan


def single_tokens(plan: StepPlan, first_known: int) -> Iterator[StepPlan]:
    """Yields a plan for each token of a step, in order. `first_known` is as in StepInputs.

    The copies of recurrent states before and after the step are left to the caller, and so are the logits.
    """
    column = 0
    batch = plan.attention
    chunks = zip(plan.slots, plan.base_lens, batch.query_lens, batch.context_lens, batch.block_tables, strict=True)
    for i, (slot, num_base, count, context, table) in enumerate(chunks):
        for k in range(count):
            fields_FT = plan.fields_FT[:, column : column + 1].copy()
            if fields_FT[SOURCE] >= first_known:  # It is known to the host, and the only one in its own step.
                fields_FT[SOURCE] = first_known
            yield replace(
                plan,
                fields_FT=fields_FT,
                attention=AttentionBatch([1], [context - count + k + 1], [table]),
                slots=[slot if k >= num_base else BASE_SLOT],
                base_lens=[0],
                sampling=[0],
                prompts=[],
                state_slots=plan.state_slots[i : i + 1],
                resumed_states=[],
                state_snapshots=[],
                kept_states=plan.kept_states[column : column + 1],
            )
            column += 1
