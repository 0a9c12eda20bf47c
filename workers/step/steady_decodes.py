"""Plans a step of the decodes that the last step had, from its plan: only what moves with each token is new.

Most steps are of this kind. Their plan takes the host a few operations for each sequence, and a look into the block
table only for a sequence that enters a block.
"""

# B sequences, with a token each

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import is_

import numpy as np

from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk


class SteadyDecodes:
    """The decodes of the last step, if it had nothing else.

    Args:
        block_size: Tokens of a KV block.
        first_known: As in plan_step.
    """

    def __init__(self, block_size: int, first_known: int) -> None:
        self._size = block_size
        self._first_known = first_known
        self._chunks: list[Chunk] = []
        self._plan: StepPlan | None = None  # of these chunks

    def remember(self, chunks: list[Chunk], plan: StepPlan) -> None:
        """Takes in the plan of a step that next_plan() could not plan."""
        is_steady = plan.is_decode and not any(plan.base_lens)
        if is_steady and all(chunk is chunk.sequence.next_chunk for chunk in chunks):
            self._chunks, self._plan = chunks, plan
        else:
            self._chunks, self._plan = [], None

    def next_plan(
        self, chunks: list[Chunk], row_by_request: Mapping[str, int], slot_ranks: list[int]
    ) -> StepPlan | None:
        """Returns the plan of a step, or None if it is not of the last step's decodes.

        A sequence has another chunk, though an equal one, once it has lost its blocks and its slots. So those of the
        last plan are still its own. The arguments are plan_step's.
        """
        last = self._plan
        if last is None or len(chunks) != len(self._chunks) or not all(map(is_, chunks, self._chunks)):
            return None
        sequences, tables = [chunk.sequence for chunk in chunks], last.attention.block_tables
        fields_FB = last.fields_FT.copy()
        token_B, source_B, position_B, rope_length_B, kv_slot_B = fields_FB
        token_B[:] = [sequence.tokens[-1] for sequence in sequences]
        source_B[:] = np.arange(self._first_known, self._first_known + len(chunks))
        for i in np.flatnonzero(token_B == UNKNOWN).tolist():
            source_B[i] = row_by_request[sequences[i].request_id]
        position_B[:] = [sequence.num_computed for sequence in sequences]
        np.maximum(rope_length_B, position_B + 1, out=rope_length_B)
        kv_slot_B += position_B - last.fields_FT[2]
        for i in np.flatnonzero(position_B // self._size != last.fields_FT[2] // self._size).tolist():
            block, offset = divmod(int(position_B[i]), self._size)
            kv_slot_B[i] = tables[i][block] * self._size + offset
        attention = AttentionBatch(last.attention.query_lens, (position_B + 1).tolist(), tables)
        self._plan = replace(last, fields_FT=fields_FB, attention=attention, slot_ranks=slot_ranks)
        return self._plan
