"""Runs a draft model behind a step of the target whose tokens the host has not read.

Its first step computes all tokens that the target's step has drawn, one for each of its rows. Those behind a wrong
draft are computed in vain: later steps overwrite their keys and values, and see none of them. The device picks the row
of the last right one, and goes on behind it. So the positions of the steps that follow are known to the device alone.
"""

# T rows of the target's step · W sequences · K draft tokens

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.device.draft_verification import DraftVerification, VerifiedRows
from lorafleet.workers.device.host_copy import array_to_device
from lorafleet.workers.device.unread_inputs import UnreadInputs
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.speculation.draft_slots import DraftSlots
from lorafleet.workers.speculation.draft_steps import DraftSteps
from lorafleet.workers.speculation.drafter import DeviceDrafts
from lorafleet.workers.speculation.followed_sequence import FollowedSequence
from lorafleet.workers.step.decode_columns import TokensBefore
from lorafleet.workers.step.planner import plan_step


@dataclass(frozen=True, slots=True)
class BehindStep:
    """A sequence of the target's step that gets drafts."""

    target: Sequence
    followed: FollowedSequence
    rows: VerifiedRows  # Its rows in the target's step.
    count: int  # Number of drafts, at least 1.

    @property
    def own(self) -> Sequence:
        return self.followed.own


class BehindSteps:
    """The steps of one draft model.

    Args:
        num_tokens: Number of tokens that both the target and the draft model have.
    """

    def __init__(self, steps: DraftSteps, block_size: int, slots: DraftSlots | None, num_tokens: int) -> None:
        self._steps = steps
        self._block_size = block_size
        self._slots = slots
        self._num_tokens = num_tokens

    def run(self, entries: Many[BehindStep], step: DraftVerification) -> DeviceDrafts:
        """Queues the steps that make the drafts. The sequences that get most come first. Their own tokens are the known
        ones afterwards.

        A draft that the target does not have becomes another one.
        """
        counts = {entry.target: entry.count for entry in entries}
        if not entries:
            return DeviceDrafts(step.drawn_B.new_empty(0, 0), {}, {})
        last_W, short_W = self._compute_drawn(entries, step)
        token_W = self._drawn()[last_W]
        drafts = [token_W]
        for place in range(1, entries[0].count):
            going = [entry for entry in entries if entry.count > place]
            last_W, token_W = last_W[: len(going)], token_W[: len(going)]
            self._compute_draft(going, last_W, token_W, short_W[: len(going)])
            token_W = self._drawn()[: len(going)].clone()
            last_W = torch.arange(len(going), device=token_W.device)
            drafts.append(torch.nn.functional.pad(token_W, (0, len(entries) - len(going))))
        for entry in entries:
            del entry.own.tokens[entry.followed.num_known :]
            entry.own.num_computed = entry.followed.num_known
            entry.own.num_unverified = 0
        rows = {entry.target: row for row, entry in enumerate(entries)}
        return DeviceDrafts(torch.stack(drafts, dim=1), rows, counts)

    def _compute_drawn(self, entries: Many[BehindStep], step: DraftVerification) -> tuple[Tensor, Tensor]:
        """Computes the tokens that the target's step has drawn. Returns the row of each sequence's last right one, and
        the number of those behind it."""
        chunks: list[Chunk] = []
        drawn: list[int] = []
        sources: list[int] = []
        for entry in entries:
            count, own = entry.rows.num_drafts, entry.own
            own.tokens.append(UNKNOWN)
            chunks.append(Chunk(own, 1 + count, drafts=[UNKNOWN] * count))
            drawn += range(entry.rows.first, entry.rows.first + 1 + count)
            if self._steps.rows is not None:
                end = own.num_computed + 1 + count
                slots = entry.followed.feature_slots(entry.target, end, self._block_size)
                sources += [self._steps.rows.most_rows + slot for slot in slots]
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        per_entry = [
            [entry.rows.index for entry in entries],
            [end - chunk.num_tokens for end, chunk in zip(ends, chunks, strict=True)],
            [entry.rows.num_drafts for entry in entries],
        ]
        packed = array_to_device(np.concatenate((np.array(per_entry).ravel(), drawn)), step.drawn_B.device)
        index_W, first_W, count_W = packed[: 3 * len(entries)].view(3, -1)
        token_T = self._readable(step.drawn_B[packed[3 * len(entries) :]])
        self._run(chunks, sources, UnreadInputs(torch.arange(len(drawn), device=token_T.device), token_T))
        for entry in entries:  # As if all drafts of the target's step were right.
            entry.own.num_computed += 1
            entry.own.num_unverified = entry.rows.num_drafts
        accepted_W = step.accepted_S[index_W]
        return first_W + accepted_W, count_W - accepted_W

    def _compute_draft(self, entries: Many[BehindStep], last_W: Tensor, token_W: Tensor, short_W: Tensor) -> None:
        """Computes the last draft token of each sequence.

        Args:
            last_W: The row of the last step in which each was drawn.
            short_W: As in UnreadInputs.
        """
        chunks: list[Chunk] = []
        for entry in entries:
            entry.own.tokens.append(UNKNOWN)
            chunks.append(Chunk(entry.own, 1))
        most_short = max(entry.rows.num_drafts for entry in entries)
        in_order_W = torch.arange(len(entries), device=token_W.device)
        self._run(chunks, last_W, UnreadInputs(in_order_W, token_W, short_W if most_short else None, most_short))
        for entry in entries:
            entry.own.num_computed += 1

    def _run(self, chunks: list[Chunk], sources: list[int] | Tensor, unread: UnreadInputs) -> None:
        """Runs a step of these chunks. `sources` are as in DraftSteps.run, and `unread` is what the plan lacks."""
        rows = {chunk.sequence.request_id: 0 for chunk in chunks}  # The tokens come from `unread`.
        slot_ranks = [] if self._slots is None else self._slots.ranks
        first_known = self._steps.runner.inputs.first_known
        plan = plan_step(chunks, TokensBefore(rows), first_known, self._block_size, slot_ranks)
        self._steps.run(plan, sources, unread)

    def _drawn(self) -> Tensor:
        """Returns the tokens that the last step has drawn, as far as the target has them too."""
        return self._readable(self._steps.runner.inputs.sampled_B)

    def _readable(self, token_T: Tensor) -> Tensor:
        return token_T.clamp(max=self._num_tokens - 1)
