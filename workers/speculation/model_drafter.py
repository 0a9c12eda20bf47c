"""Drafts tokens with a small model: its likeliest next tokens, one after another, for all sequences at a time.

It runs the model as the engine runs the target: with plans of steps, a paged KV cache and adapter slots. Steps of the
draft model follow each other on the device, each reading the last one's tokens there, and the host waits once.

It computes nothing for sequences that get no drafts. So a sequence may have many tokens that the draft model has not
seen. These are computed first, some in each call, and the sequence gets drafts once they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.device.host_copy import to_device
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.speculation.behind_steps import BehindStep, BehindSteps
from lorafleet.workers.speculation.draft_slots import DraftSlots
from lorafleet.workers.speculation.draft_steps import DraftSteps
from lorafleet.workers.speculation.drafter import DeviceDrafts, Wanted
from lorafleet.workers.speculation.followed_sequence import FollowedSequence
from lorafleet.workers.step.decode_columns import TokensBefore
from lorafleet.workers.step.planner import plan_step

# Tokens that one call computes before the first draft, in all sequences together: some milliseconds of a small model.
CAUGHT_UP_TOKENS = 1024

Place = tuple[Sequence, int]  # A token of a sequence, by its index.


class ModelDrafter:
    """The drafts of one engine.

    Args:
        steps: Runs the draft model or head. Its inputs have room for CAUGHT_UP_TOKENS.
        kv: The blocks of its KV cache.
        slots: The draft LoRAs of adapters. None if there are no adapters.
        base_vocab: Size of the base's vocabulary. Larger tokens are not drafted, and end a draft.
        longest: Number of tokens of the longest sequence that it drafts for.
        most_rows: Most tokens of one sequence that are computed as a token and its drafts.
    """

    def __init__(
        self,
        steps: DraftSteps,
        kv: KVCacheManager,
        slots: DraftSlots | None,
        base_vocab: int,
        longest: int,
        most_rows: int,
    ) -> None:
        self.kv = kv
        self.steps = steps.runner
        self._draft_steps = steps
        self.slots = slots
        self._vocab_size = base_vocab
        self._readable = base_vocab if steps.rows is not None else steps.runner.model.config.vocab_size
        self._longest = longest
        self._most_rows = most_rows
        self._behind = BehindSteps(steps, kv.block_size, slots, min(base_vocab, self._readable))
        self._followed: dict[Sequence, FollowedSequence] = {}  # That of the last drafts comes last.
        self._without_room: set[Sequence] = set()  # Sequences that found none since a sequence ended last.

    @property
    def is_of_head(self) -> bool:
        """Whether a head drafts, which reads weights of the target."""
        return self._draft_steps.rows is not None

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        """Returns the draft model's likeliest continuation of each sequence. There is none for a sequence that the
        draft model has not computed yet, or cannot compute: one that is longer than it takes, has tokens that it does
        not have, or finds no free block."""
        counts: dict[FollowedSequence, int] = {}
        found = [self._follow(entry) for entry in wanted]
        for entry, followed in zip(wanted, found, strict=True):
            if not followed.drafts:
                count = min(entry.most, self._longest + 1 - entry.num_known)
                if self._can_draft(followed, count):
                    counts[followed] = count
        chunks = self._first_chunks(counts, keep=set(found))
        if chunks:
            self._run(
                chunks, {followed.own: counts[followed] for followed in counts}, self._features(chunks, wanted, found)
            )
        return [self._usable(followed.drafts[: entry.most]) for entry, followed in zip(wanted, found, strict=True)]

    def is_current(self, entry: Wanted, step: DraftVerification) -> bool:
        """Returns whether it has computed all known tokens of a sequence in the step, or cannot draft for it at all."""
        followed = self._followed.get(entry.sequence)
        if followed is None or entry.sequence not in step.rows or followed.digest != self._digest(entry.sequence)[0]:
            return False
        if not self._can_draft(followed, self._room_behind(entry, step)):
            return True
        is_known = followed.num_known == entry.num_known - followed.first
        return followed.behind == step.number - 1 or (is_known and followed.num_missing <= 0)

    def may_catch_up(self, sequence: Sequence) -> bool:
        """Returns whether the sequence may find room for its known tokens now."""
        return sequence not in self._without_room

    @torch.inference_mode()
    def propose_behind(self, wanted: Many[Wanted], step: DraftVerification) -> DeviceDrafts:
        """Queues steps of the draft model behind the step in flight: one for all of its rows, those of wrong drafts
        too, and then one for each further draft token of a sequence."""
        before = [self._followed.get(entry.sequence) for entry in wanted]
        found = [self._follow(entry) for entry in wanted]
        entries: list[BehindStep] = []
        for entry, known, followed in zip(wanted, before, found, strict=True):
            rows, count = step.rows[entry.sequence], min(entry.most, self._room_behind(entry, step))
            # If its draft LoRA has arrived since is_current(), nothing is computed with it.
            if followed is known and self._can_draft(followed, count):
                followed.go_behind(step.number)
                if self._grow(followed, followed.num_known + rows.num_drafts + count, set(found)):
                    entries.append(BehindStep(entry.sequence, followed, rows, count))
                else:
                    followed.behind = None
        entries.sort(key=lambda entry: -entry.count)
        return self._behind.run(entries, step)

    def release(self, sequence: Sequence) -> None:
        followed = self._followed.pop(sequence, None)
        if followed is not None:
            followed.close()
        self._without_room.clear()  # There may be room now.

    def _follow(self, entry: Wanted) -> FollowedSequence:
        """Returns the draft model's sequence, with the tokens that are known now and the slot of its draft LoRA."""
        sequence, num_known, _ = entry
        digest, slot = self._digest(sequence)
        followed = self._followed.pop(sequence, None)
        if followed is not None and followed.digest != digest:
            followed.close()
            followed = None
        if followed is None:
            followed = FollowedSequence(sequence, num_known, digest, self.kv, is_of_head=self.is_of_head)
        else:
            followed.advance(sequence, num_known)
        self._followed[sequence] = followed
        followed.own.slot = slot
        return followed

    def _digest(self, sequence: Sequence) -> tuple[str, int | None]:
        """Returns FollowedSequence.digest for a sequence, and the slot of its draft LoRA."""
        slot = None if self.slots is None else self.slots.find(sequence.slot, sequence.digest)
        return sequence.digest if slot is not None or self.is_of_head else "", slot

    def _can_draft(self, followed: FollowedSequence, count: int) -> bool:
        """Returns whether the draft model can read the known tokens, and has room for so many drafts behind them."""
        return count > 0 and followed.num_known > 0 and followed.largest_token < self._readable

    def _room_behind(self, entry: Wanted, step: DraftVerification) -> int:
        """Returns how many drafts the draft model has room for behind all drafts of the step in flight."""
        return self._longest - entry.num_known - step.rows[entry.sequence].num_drafts

    def _first_chunks(self, counts: dict[FollowedSequence, int], keep: set[FollowedSequence]) -> list[Chunk]:
        """Returns the known tokens that are computed now, the sequences with the fewest first. A sequence without room
        is left out.

        For each layer, a step stores all keys and values before it reads any. So n samples of one prompt compute it
        once.
        """
        chunks: list[Chunk] = []
        num_left = CAUGHT_UP_TOKENS
        for followed in sorted(counts, key=lambda followed: followed.num_missing):
            if not num_left:
                break
            followed.reuse_prefix()
            num_tokens = min(followed.num_missing, num_left)
            end = followed.own.num_computed + num_tokens
            if end == followed.num_known:
                end += counts[followed] - 1
            if num_tokens > 0 and self._grow(followed, end, keep):
                chunks.append(Chunk(followed.own, num_tokens))
                followed.share(followed.own.num_computed + num_tokens)
                num_left -= num_tokens
        return chunks

    def _grow(self, followed: FollowedSequence, num_tokens: int, keep: set[FollowedSequence]) -> bool:
        """Takes free blocks and, if these are too few, those of sequences for which this call drafts nothing. Returns
        whether there were enough."""
        blocks, has_room = followed.own.blocks, False
        assert blocks is not None
        others = [other for other in self._followed.values() if other not in keep]
        while not (has_room := self.kv.grow(blocks, num_tokens)) and others:
            other = others.pop(0)
            del self._followed[other.target]
            other.close()
            self._without_room.add(other.target)
        if has_room:
            self._without_room.discard(followed.target)
        else:
            self._without_room.add(followed.target)
        return has_room

    def _features(self, chunks: list[Chunk], wanted: Many[Wanted], found: Many[FollowedSequence]) -> list[int]:
        """Returns the row of the feature of each token of the chunks, if a head drafts."""
        rows = self._draft_steps.rows
        if rows is None:
            return []
        of_own = {followed.own: (followed, entry.sequence) for followed, entry in zip(found, wanted, strict=True)}
        sources: list[int] = []
        for chunk in chunks:
            followed, target = of_own[chunk.sequence]
            end = chunk.sequence.num_computed + chunk.num_tokens
            slots = followed.feature_slots(target, end, self.kv.block_size)
            sources += [rows.most_rows + slot for slot in slots]
        return sources

    @torch.inference_mode()
    def _run(self, chunks: list[Chunk], counts: dict[Sequence, int], sources: list[int]) -> None:
        """Computes the chunks, then a draft token of each sequence in each step.

        Args:
            counts: The tokens wanted.
            sources: For a head, the rows of the features of the chunks' tokens.
        """
        rows: dict[str, int] = {}
        drawn: list[tuple[list[Place], Tensor]] = []
        inputs = self.steps.inputs
        while chunks:
            plan, last_rows = self._plan(chunks, rows)
            self._draft_steps.run(plan, sources)
            sampling = [chunk.sequence for chunk in chunks if chunk.samples]
            rows = {sequence.request_id: row for sequence, row in zip(sampling, last_rows, strict=True)}
            for chunk in chunks:
                chunk.sequence.num_computed += chunk.num_tokens
            places = [(sequence, len(sequence.tokens)) for sequence in sampling]
            for sequence in sampling:
                sequence.tokens.append(UNKNOWN)
            drawn.append((places, _rows_of(inputs.sampled_B, last_rows)))
            chunks = [Chunk(sequence, 1) for sequence in sampling if counts[sequence] > len(drawn)]
            sources = [rows[chunk.sequence.request_id] for chunk in chunks]
        self._fill_in(drawn)

    def _fill_in(self, drawn: Many[tuple[list[Place], Tensor]]) -> None:
        """Writes the tokens that the steps have drawn to their places. Waits for the device."""
        places = [place for of_step, _ in drawn for place in of_step]
        if not places:
            return
        tokens = self._draft_steps.read(torch.cat([tokens_B for _, tokens_B in drawn]))
        for (sequence, index), token in zip(places, tokens, strict=True):
            sequence.tokens[index] = token

    def _plan(self, chunks: list[Chunk], rows: Mapping[str, int]) -> tuple[StepPlan, list[int]]:
        """Returns the plan of a step, and the row of each chunk's last token among those that sample.

        The tokens of short chunks are planned as a token and its drafts, whose steps captured graphs run.

        Args:
            rows: The row of each sequence in the last step, if it has sampled.
        """
        slot_ranks = [] if self.slots is None else self.slots.ranks
        first_known, num_rows = self.steps.inputs.first_known, sum(chunk.num_tokens for chunk in chunks)
        longest = max(chunk.num_tokens for chunk in chunks)
        if longest == 1 or longest > self._most_rows or num_rows > first_known or not all(c.samples for c in chunks):
            plan = plan_step(chunks, TokensBefore(rows), first_known, self.kv.block_size, slot_ranks)
            return plan, list(range(len(plan.sampling)))
        drafted: list[Chunk] = []
        for chunk in chunks:
            behind = chunk.sequence.num_computed + 1
            drafted.append(replace(chunk, drafts=chunk.sequence.tokens[behind:]))
            del chunk.sequence.tokens[behind:]
        plan = plan_step(drafted, TokensBefore(rows), first_known, self.kv.block_size, slot_ranks)
        for chunk in drafted:
            chunk.sequence.tokens.extend(chunk.drafts)
        return plan, [end - 1 for end in accumulate(chunk.num_tokens for chunk in chunks)]

    def _usable(self, drafts: list[int]) -> list[int]:
        """Returns the drafts before the first that the target does not know."""
        for i, token in enumerate(drafts):
            if token >= self._vocab_size:
                return drafts[:i]
        return drafts


def _rows_of(sampled_B: Tensor, rows: list[int]) -> Tensor:
    """Returns a copy of these rows, which the next step overwrites."""
    if rows == list(range(len(rows))):
        return sampled_B[: len(rows)].clone()
    return sampled_B[to_device(rows, torch.int64, sampled_B.device)]
