"""Holds what a planned step lacks because it depends on results that the host has not read: the lengths of sequences
whose drafts are being verified, and tokens that the device has chosen or drafted.

The host plans such a step as if every draft in flight were accepted. The device corrects what the step reads before it
runs. A step that no captured graph with drafts runs waits for the results, and is corrected on the host.
"""

# T tokens of the step · B sequences · N tokens that the host does not know · K most draft tokens of a sequence

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.host_copy import Download, array_to_device
from lorafleet.workers.device.step_plan import Rows, StepPlan


@dataclass(frozen=True, slots=True)
class UnreadInputs:
    """The missing part of one StepPlan, on the device. All tensors are int64."""

    row_N: Tensor  # Rows of the step with tokens that the host does not know when it plans the step.
    token_N: Tensor | None  # These tokens. None until the host knows them, if it makes the drafts.
    # Tokens by which each sequence is shorter than it was planned. None if no sequence is.
    short_B: Tensor | None = None
    most_short: int = 0  # Largest number of these.

    def with_tokens(self, tokens: list[int]) -> UnreadInputs:
        """Returns them with the tokens, which the host knows by now."""
        return replace(self, token_N=array_to_device(np.array(tokens, np.int64), self.row_N.device))

    def with_known(
        self, plan: StepPlan, first_known: int, block_size: int, check: Callable[[], None] | None = None
    ) -> StepPlan:
        """Returns the plan with what it lacked. Waits for the device. The tokens must be there.

        Args:
            first_known: As in StepInputs.
            check: As in Download. It raises if the device waits for a rank that is gone.
        """
        fields_FT, batch = plan.fields_FT.copy(), plan.attention
        download = Download(self.row_N.device, check)
        assert self.token_N is not None
        arriving = [download.add(part) for part in (self.row_N, self.token_N, self.short_B) if part is not None]
        download.close()
        download.wait()
        row_N, token_N, *short = (part.numpy() for part in arriving)
        fields_FT[0, row_N], fields_FT[1, row_N] = token_N, first_known + row_N
        if not short:
            return replace(plan, fields_FT=fields_FT)
        short_B = short[0]
        short_T = short_B.repeat(batch.query_lens)
        fields_FT[2:4] -= short_T
        fields_FT[4] = kv_slots(plan, block_size, self.most_short)[np.arange(plan.num_tokens), short_T]
        lens = (np.array(batch.context_lens) - short_B).tolist()
        attention = AttentionBatch(batch.query_lens, lens, batch.block_tables)
        if not plan.state_rings:
            return replace(plan, fields_FT=fields_FT, attention=attention)
        slot_NK, num_seqs = state_slots(plan, self.most_short), len(plan.state_slots)
        short_N = np.concatenate((short_B, short_T))[: len(slot_NK)]
        slots = slot_NK[np.arange(len(slot_NK)), short_N].tolist()
        states, kept = slots[:num_seqs], slots[num_seqs:]
        return replace(
            plan, fields_FT=fields_FT, attention=attention, state_slots=states, kept_states=kept, state_rings=[]
        )


class Corrections:
    """The places that the device needs besides UnreadInputs to correct the inputs of a step in which sequences may be
    shorter."""

    def __init__(self, plan: StepPlan, block_size: int, most_short: int, device: torch.device) -> None:
        num_tokens, lens = plan.num_tokens, plan.attention.query_lens
        slots_TK = kv_slots(plan, block_size, most_short)
        packed = np.concatenate((np.arange(len(lens)).repeat(lens), slots_TK.ravel()))
        on_device = array_to_device(packed, device)
        self.sequence_T = on_device[:num_tokens]  # Each token's sequence.
        self.kv_slot_TK = on_device[num_tokens:].view(slots_TK.shape)  # As kv_slots() returns them.
        # As state_slots() returns them; None if no state depends on the lengths.
        self.state_slot_NK = array_to_device(state_slots(plan, most_short), device) if plan.state_rings else None

    def known_state_slots(self, short_B: Tensor) -> Tensor | None:
        """Returns the slot of each sequence's state and, behind these, that of each token's kept state, int64, or None
        if these are the planned ones. short_B is as in UnreadInputs."""
        if self.state_slot_NK is None:
            return None
        short_N = torch.cat((short_B, short_B[self.sequence_T]))[: len(self.state_slot_NK)]
        return self.state_slot_NK.gather(1, short_N[:, None]).squeeze(1)


def kv_slots(plan: StepPlan, block_size: int, most_short: int) -> Rows:
    """Returns the KV slot of each token if its sequence is 0 to most_short tokens shorter, [T, 1 + most_short].

    Slots of places before the beginning of a sequence are arbitrary.
    """
    lens, tables = plan.attention.query_lens, plan.attention.block_tables
    end_B = np.array(plan.attention.context_lens)
    first_B = np.maximum(end_B - lens - most_short, 0) // block_size
    count_B = (end_B - 1) // block_size + 1 - first_B
    spans = zip(tables, first_B.tolist(), count_B.tolist(), strict=True)
    blocks = np.concatenate([np.asarray(table[first : first + count], np.int64) for table, first, count in spans])
    start_B = count_B.cumsum() - count_B - first_B  # Where block 0 of each sequence would be in these.
    position_TK = plan.fields_FT[2][:, None] - np.arange(1 + most_short)
    block_TK = np.maximum(position_TK // block_size, first_B.repeat(lens)[:, None])
    slots: Rows = blocks[start_B.repeat(lens)[:, None] + block_TK] * block_size + position_TK % block_size
    return slots


def state_slots(plan: StepPlan, most_short: int) -> Rows:
    """Returns the state slot of each sequence and, behind these, the slot for the kept state of each token, if its
    sequence is 0 to most_short tokens shorter, [B + T, 1 + most_short] or [B, 1 + most_short].

    StateSlots.verified says which slot of a ring takes the place of which.
    """
    sequences = [*range(len(plan.state_slots)), *np.arange(len(plan.slots)).repeat(plan.attention.query_lens).tolist()]
    rows: list[list[int]] = []
    for slot, sequence in zip((*plan.state_slots, *plan.kept_states), sequences, strict=False):
        ring, shorts = plan.state_rings[sequence], range(1 + most_short)
        place = ring.index(slot) if slot in ring else None
        rows.append([slot if place is None else ring[(place - short) % len(ring)] for short in shorts])
    return np.array(rows, np.int64)
