"""Adds the results of steps to sequences, and turns them into the outputs that leave the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Many

from lorafleet.protocol.messages import DraftCounts, FinishReason, PlainTokens, SequenceTimes, TokenOutput, WeightSwitch
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.step.runner import Sampled

log = logging.getLogger(__name__)


class AnswerProgress:
    def __init__(self, scheduler: Scheduler, loras: WorkerLoRAManager | None) -> None:
        self.num_prompt_tokens = 0  # of all sequences that have a token
        self.num_generated_tokens = 0
        self._scheduler = scheduler
        self._loras = loras

    def advance_quiet(self, chunks: Many[Chunk], ends: Many[int], tokens: Many[int], outputs: PlainTokens) -> list[int]:
        """Takes in one token of each of the first sequences, where nothing is due but the token and full blocks, and
        adds it to the outputs. Most tokens of large batches are of this kind, so no object is made for one. Returns the
        indices of the other tokens, which advance() must take in.

        Args:
            chunks, ends: As in CollectedStep.
        """
        due: list[int] = []
        request_ids, token_ids = outputs.request_ids, outputs.token_ids
        for i, (token, end, chunk) in enumerate(zip(tokens, ends, chunks, strict=False)):
            sequence = chunk.sequence
            if token in sequence.stop_ids or (end >= sequence.quiet_until and not self._stays_quiet(sequence, end)):
                due.append(i)
                continue
            sequence.tokens[end] = token
            request_ids.append(sequence.request_id)
            token_ids.append(token)
        self.num_generated_tokens += len(tokens) - len(due)
        return due

    def _stays_quiet(self, sequence: Sequence, end: int) -> bool:
        """Publishes the full blocks of the first `end` tokens, and moves the bound quiet_until behind them. Returns
        False if advance() must do that, since more is due."""
        if not sequence.quiet_until or end >= sequence.last_end:
            return False
        try:
            self._scheduler.memory.commit(sequence, end)
        except Exception:
            log.exception("the blocks of request %s could not be published", sequence.request_id)
            return False  # advance() fails too, and ends this sequence alone
        self._quiet_behind(sequence, end)
        return True

    def _quiet_behind(self, sequence: Sequence, end: int) -> None:
        """Moves the bound quiet_until of a plain sequence, of whose first `end` tokens the full blocks are known."""
        sequence.quiet_until = min(self._scheduler.memory.quiet_until(end), sequence.last_end)

    def advance(
        self, sequence: Sequence, end: int, sampled: Sampled, num_drafts: int = 0, num_planned: int = 0
    ) -> TokenOutput | None:
        """Takes in what a step computed for a sequence. Returns its output, or None if no token was sampled.

        Args:
            end: Number of the sequence's tokens that the step had computed, without drafts. The sampled ones come
                behind them.
            num_drafts: Number of draft tokens that the step has verified.
            num_planned: Number for which it had room.
        """
        self._scheduler.commit(sequence, end)
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += sampled.prompt
        if not sampled.tokens:
            _add_routed(sequence, end, sampled, num_planned, 0)
            return None
        assert sequence.tokens[end] == UNKNOWN
        num_generated = end + 1 - sequence.num_prompt  # With the first of the sampled tokens.
        tokens, finish_reason = _until_finished(sequence, sampled.tokens, num_generated)
        sequence.tokens[end : end + 1] = tokens
        self.num_generated_tokens += len(tokens)
        output = TokenOutput(request_id=sequence.request_id, token_ids=tokens, finish_reason=finish_reason)
        if num_planned:
            self._accept(sequence, end, num_planned, len(tokens) - 1)
        if num_drafts:
            output.drafts = DraftCounts(1, num_drafts, len(sampled.tokens) - 1)
        if not sequence.is_plain:
            _add_routed(sequence, end, sampled, num_planned, len(tokens) - 1)
            self._add_values(sequence, sampled, output)
        elif not sequence.switched:
            self._quiet_behind(sequence, end)
        if num_generated == 1:
            self._describe_start(sequence, output)
        if sequence.switched:
            assert sequence.lora is not None
            output.switches, sequence.switched = [WeightSwitch(num_generated - 1, sequence.lora)], False
        if sequence.times is not None and (num_generated == 1 or output.finish_reason is not None):
            output.times = _recorded(sequence, sequence.times, output.finish_reason)
        if output.finish_reason == "stop":
            output.stop_token_id = tokens[-1]
        return output

    def _add_values(self, sequence: Sequence, sampled: Sampled, output: TokenOutput) -> None:
        """Adds to an output what the sequence wants besides tokens."""
        output.logprobs = sampled.logprobs[: len(output.token_ids)] or None
        if sequence.routed is not None:
            output.routed_experts = sequence.routed.take()
        if sequence.pooling is not None:  # it has sampled a token all the same, which is dropped
            self.num_generated_tokens -= len(output.token_ids)
            output.token_ids, output.embedding = [], sampled.embedding

    def _accept(self, sequence: Sequence, end: int, num_planned: int, num_accepted: int) -> None:
        """Records that so many of the step's drafts were accepted, and are tokens of the sequence now."""
        self._scheduler.memory.verified(sequence, num_accepted)
        sequence.num_unverified -= num_planned
        sequence.num_computed += num_accepted
        self._scheduler.commit(sequence, end + num_accepted)
        self._scheduler.waiting.count_outputs([sequence.flow] * num_accepted)

    def _describe_start(self, sequence: Sequence, output: TokenOutput) -> None:
        """Adds to the first output what is known of the sequence's start."""
        self.num_prompt_tokens += sequence.num_prompt
        output.num_cached_tokens = sequence.num_cached
        output.queue_s = sequence.started_s - sequence.queued_s
        output.tier = sequence.tier
        output.lora_rank = self._rank_of(sequence)
        output.fallback_reason = sequence.fallback_reason
        if sequence.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *sequence.prompt_logprobs]

    def _rank_of(self, sequence: Sequence) -> int:
        """Returns the rank of the sequence's adapter, or 0 for the base."""
        if sequence.slot is None or self._loras is None:
            return 0
        adapter = self._loras.slots.slots[sequence.slot].adapter
        assert adapter is not None, "a sequence holds its slot until it ends"
        return adapter.info.rank


def _add_routed(sequence: Sequence, end: int, sampled: Sampled, num_drafts: int, num_accepted: int) -> None:
    """Adds the experts of the tokens before `end` that the step computed, and of the accepted drafts behind them."""
    if sequence.routed is not None and sampled.routed_TLK is not None:
        num_tokens = len(sampled.routed_TLK) - num_drafts + num_accepted
        sequence.routed.add(end + num_accepted, sampled.routed_TLK[:num_tokens])


def _until_finished(sequence: Sequence, tokens: list[int], num_generated: int) -> tuple[list[int], FinishReason | None]:
    """Returns the sampled tokens up to the one that ends the answer, and why it ends there.

    `num_generated` is the length of the answer with the first of them.
    """
    for i, token in enumerate(tokens):
        reason = _finish_reason(sequence, token, num_generated + i)
        if reason is not None:
            return tokens[: i + 1], reason
    return tokens, None


def _finish_reason(sequence: Sequence, token: int, num_generated: int) -> FinishReason | None:
    if token in sequence.stop_ids and num_generated >= sequence.params.min_tokens:
        return "stop"
    return "length" if num_generated >= sequence.max_tokens else None


def _recorded(sequence: Sequence, times: SequenceTimes, finish_reason: FinishReason | None) -> SequenceTimes:
    """Records the times of a sequence at its first token and at its last."""
    now = time.monotonic()
    times.queued_s, times.started_s = sequence.queued_s, sequence.started_s
    times.first_s = times.first_s or now
    times.ended_s = 0.0 if finish_reason is None else now
    return times
