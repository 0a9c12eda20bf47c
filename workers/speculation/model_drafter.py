"""Drafts tokens with a small model: its likeliest next tokens, one after another, for all sequences at a time.

It runs the model as the engine runs the target: with plans of steps, a paged KV cache and adapter slots. Steps of the
draft model follow each other on the device, each reading the last one's tokens there, and the host waits once.

It computes nothing for sequences that get no drafts. So a sequence may have many tokens that the draft model has not
seen. These are computed first, some in each call, and the sequence gets drafts once they are.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.speculation.draft_slots import DraftSlots
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.followed_sequence import FollowedSequence
from lorafleet.workers.step.planner import plan_step
from lorafleet.workers.step.step_runner import StepRunner

# Tokens that one call computes before the first draft, in all sequences together: some milliseconds of a small model.
CAUGHT_UP_TOKENS = 1024

Place = tuple[Sequence, int]  # A token of a sequence, by its index.


class ModelDrafter:
    """The drafts of one engine.

    Args:
        steps: Runs the draft model. Its inputs have room for CAUGHT_UP_TOKENS.
        kv: The blocks of its KV cache.
        slots: The draft LoRAs of adapters. None if there are no adapters.
        base_vocab: Size of the base's vocabulary. Larger tokens are not drafted, and end a draft.
    """

    def __init__(self, steps: StepRunner, kv: KVCacheManager, slots: DraftSlots | None, base_vocab: int) -> None:
        self.kv = kv
        self.steps = steps
        self.slots = slots
        self._vocab_size = base_vocab
        self._followed: dict[Sequence, FollowedSequence] = {}  # The one that was drafted for last is the last one.

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        """Returns the draft model's likeliest continuation of each sequence. There is none for a sequence that the
        draft model has not computed yet, or cannot compute: one that is longer than it takes, has tokens that it does
        not have, or finds no free block."""
        counts: dict[FollowedSequence, int] = {}
        found = [self._follow(entry) for entry in wanted]
        for entry, followed in zip(wanted, found, strict=True):
            if not followed.drafts:
                count = min(entry.most, self.steps.model.config.context_limit + 1 - entry.num_known)
                if count > 0 and followed.largest_token < self.steps.model.config.vocab_size:
                    counts[followed] = count
        chunks = self._first_chunks(counts, keep=set(found))
        if chunks:
            self._run(chunks, {followed.own: counts[followed] for followed in counts})
        return [self._usable(followed.drafts[: entry.most]) for entry, followed in zip(wanted, found, strict=True)]

    def release(self, sequence: Sequence) -> None:
        followed = self._followed.pop(sequence, None)
        if followed is not None:
            followed.close()

    def _follow(self, entry: Wanted) -> FollowedSequence:
        """Returns the draft model's sequence, with the tokens that are known now and the slot of its draft LoRA."""
        sequence, num_known, _ = entry
        slot = None if self.slots is None else self.slots.find(sequence.slot, sequence.digest)
        digest = "" if slot is None else sequence.digest
        followed = self._followed.pop(sequence, None)
        if followed is not None and followed.digest != digest:
            followed.close()
            followed = None
        if followed is None:
            followed = FollowedSequence(sequence, num_known, digest, self.kv)
        else:
            followed.advance(sequence.tokens, num_known)
        self._followed[sequence] = followed
        followed.own.slot = slot
        return followed

    def _first_chunks(self, counts: dict[FollowedSequence, int], keep: set[FollowedSequence]) -> list[Chunk]:
        """Returns the known tokens that are computed now, the sequences with the fewest first. A sequence without room
        is left out."""
        chunks: list[Chunk] = []
        num_left = CAUGHT_UP_TOKENS
        for followed in sorted(counts, key=lambda followed: followed.num_missing):
            num_tokens = min(followed.num_missing, num_left)
            end = followed.own.num_computed + num_tokens
            if end == followed.num_known:
                end += counts[followed] - 1
            if num_tokens > 0 and self._grow(followed, end, keep):
                chunks.append(Chunk(followed.own, num_tokens))
                num_left -= num_tokens
        return chunks

    def _grow(self, followed: FollowedSequence, num_tokens: int, keep: set[FollowedSequence]) -> bool:
        """Gets blocks, if necessary from sequences that are not drafted for now. Returns whether there are enough."""
        assert followed.own.blocks is not None
        if self.kv.grow(followed.own.blocks, num_tokens):
            return True
        for sequence, other in list(self._followed.items()):
            if other not in keep:
                self.release(sequence)
                if self.kv.grow(followed.own.blocks, num_tokens):
                    return True
        return False

    @torch.inference_mode()
    def _run(self, chunks: list[Chunk], counts: dict[Sequence, int]) -> None:
        """Computes the chunks, then a draft token of each sequence in each step. `counts` are the tokens wanted."""
        rows: dict[str, int] = {}
        drawn: list[tuple[list[Place], Tensor]] = []
        inputs = self.steps.inputs
        while chunks:
            plan = plan_step(
                chunks, rows, inputs.first_known, self.kv.block_size, [] if self.slots is None else self.slots.ranks
            )
            self.steps.run(plan)
            sampling = [chunk.sequence for chunk in chunks if chunk.samples]
            rows = {sequence.request_id: row for row, sequence in enumerate(sampling)}
            for chunk in chunks:
                chunk.sequence.num_computed += chunk.num_tokens
            places = [(sequence, len(sequence.tokens)) for sequence in sampling]
            for sequence in sampling:
                sequence.tokens.append(UNKNOWN)
            drawn.append((places, inputs.sampled_B[: len(sampling)].clone()))
            chunks = [Chunk(sequence, 1) for sequence in sampling if counts[sequence] > len(drawn)]
        _fill_in(drawn)

    def _usable(self, drafts: list[int]) -> list[int]:
        """Returns the drafts before the first that the target does not know."""
        for i, token in enumerate(drafts):
            if token >= self._vocab_size:
                return drafts[:i]
        return drafts


def _fill_in(drawn: Many[tuple[list[Place], Tensor]]) -> None:
    """Writes the tokens that the steps have drawn to their places. Waits for the device."""
    places = [place for of_step, _ in drawn for place in of_step]
    if not places:
        return
    tokens = torch.cat([tokens_B for _, tokens_B in drawn]).tolist()
    for (sequence, index), token in zip(places, tokens, strict=True):
        sequence.tokens[index] = token
