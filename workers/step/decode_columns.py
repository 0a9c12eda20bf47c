"""Plans the decodes of a step from those of the last plan: only what moves with each token is new.

Nearly all tokens of a large batch are decodes that the last step had too. They cost the host a few operations on
arrays, and a look into the block table where a sequence enters a block, though other sequences come and end.
"""

# B decodes of a step, with a token each · C chunks of a step · F fields of a token

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import repeat
from operator import is_

import numpy as np

from lorafleet.workers.device.step_plan import FIELDS, POSITION, SOURCE, Rows, StepPlan
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

NEW = -1  # in place of the index of a chunk that was not among the last plan's decodes


@dataclass(frozen=True, slots=True)
class TokensBefore:
    """Says where the tokens are that the host has not read yet, since the step in flight samples them."""

    row_by_request: Mapping[str, int]  # By request ID. Where drafts were verified, see unread_plan.py instead.
    chunks: list[Chunk] | None = None  # Those of the step in flight, if it has no drafts.


class DecodeColumns:
    """The decodes of one plan: its first chunks.

    A sequence gets another chunk, though an equal one, after it has lost its blocks and its slots. So the sequence of a
    chunk that was among these decodes still has the same blocks and slots.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        fields_FB: Rows,
        tables: Many[Many[int]],
        slots: list[int],
        step: list[Chunk],
        are_greedy: bool,
        num_plain: int,
    ) -> None:
        """Takes the columns, the block table and the slot of each decode.

        Args:
            step: All chunks of the plan.
            are_greedy: Whether it is known that all of the decodes' tokens have the largest logits.
            num_plain: Number of the decodes before the first whose sequence is not plain.
        """
        self.chunks = chunks
        self.are_greedy = are_greedy
        self.num_plain = num_plain
        self.tables = tables
        self.slots = slots
        self._fields_FB = fields_FB
        self._step = step
        self._places: dict[int, int] = {}  # By the id of the chunk; filled when it is needed.

    @classmethod
    def of_plan(cls, chunks: list[Chunk], plan: StepPlan) -> DecodeColumns:
        """Returns the decodes of a plan whose sequences have no drafts in flight."""
        tables, slots, count = plan.attention.block_tables, plan.slots, plan.num_decodes
        if any(plan.base_lens[:count]):  # The slots change within the next steps.
            count = 0
        decodes = chunks
        if count < len(chunks):
            decodes, tables, slots = chunks[:count], tables[:count], slots[:count]
        are_greedy = plan.is_greedy
        if count < len(chunks) and not are_greedy:  # A prompt of the step may have been what is not.
            are_greedy = all(chunk.sequence.takes_best for chunk in decodes)
        fields_FB = plan.fields_FT[:, :count]
        return cls(decodes, fields_FB, tables, slots, chunks, are_greedy, min(plan.num_plain, count))

    def find(self, chunks: list[Chunk]) -> Ints | None:
        """Returns the index of each chunk among these decodes, or NEW. Returns None if all of them are these decodes,
        in the same order."""
        if len(chunks) == len(self.chunks) and all(map(is_, chunks, self.chunks)):
            return None
        if not self._places:
            self._places = dict(zip(map(id, self.chunks), range(len(self.chunks)), strict=True))
        return np.fromiter(map(self._places.get, map(id, chunks), repeat(NEW)), np.int64, len(chunks))

    def advanced(
        self, chunks: list[Chunk], places_B: Ints | None, source_B: Ints, before: TokensBefore, block_size: int
    ) -> Rows:
        """Returns the columns of the next token of each of these chunks, [F, B].

        Args:
            chunks, places_B: Some of these decodes, and what find() returns for them.
            source_B: The sources of tokens that the host knows.
        """
        last_FB = self._fields_FB if places_B is None else self._fields_FB[:, places_B]
        fields_FB = last_FB.copy()
        token_B, _, position_B, rope_length_B, kv_slot_B = fields_FB
        if before.chunks is self._step:  # It has these decodes, and has moved each of them by one token.
            token_B[:] = UNKNOWN
            fields_FB[SOURCE] = np.arange(len(chunks)) if places_B is None else places_B
            position_B += 1
        else:
            token_B[:] = [chunk.sequence.tokens[-1] for chunk in chunks]
            fields_FB[SOURCE] = source_B
            for i in np.flatnonzero(token_B == UNKNOWN).tolist():
                fields_FB[SOURCE, i] = before.row_by_request[chunks[i].sequence.request_id]
            position_B[:] = [chunk.sequence.num_computed for chunk in chunks]
        np.maximum(rope_length_B, position_B + 1, out=rope_length_B)
        kv_slot_B += position_B - last_FB[POSITION]
        for i in np.flatnonzero(position_B // block_size != last_FB[POSITION] // block_size).tolist():
            block, offset = divmod(int(position_B[i]), block_size)
            blocks = chunks[i].sequence.blocks
            assert blocks is not None
            kv_slot_B[i] = blocks.table[block] * block_size + offset
        return fields_FB


def no_decodes() -> DecodeColumns:
    """Returns what stands for the last plan if there is none."""
    return DecodeColumns([], np.empty((FIELDS, 0), np.int64), [], [], [], are_greedy=True, num_plain=0)
