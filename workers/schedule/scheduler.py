"""Decides what each step computes: which sequences, how many tokens of each, with which KV blocks and adapter slots.

It does continuous batching with chunked prefill. Running sequences come first; decodes take one token each. Waiting
sequences follow in the order of fair_queue.py, as far as the step's tokens, its sequences, the KV blocks and the
adapter slots suffice. A step's time depends on its tokens, and every stream waits for it. So a step with decodes takes
fewer prompt tokens. When blocks run out, the youngest running sequence is preempted and computed again later (its
prefix is often still cached). If there are several tenants, it is the youngest of the tenant that runs most.

Tenants share a step. If one waits while another runs more sequences, its first sequence starts before all others,
including the other tenant's preempted ones. If there is no place or there are no blocks, the other tenant's youngest
sequence is preempted for it. If it needs a slot, all sequences that hold the slot are preempted. So nobody waits for a
neighbor's long answers.

With more adapters than slots, a waiting request whose adapter has no slot claims one of those in use. No request
behind it is admitted to a claimed slot. So the slot drains and is handed over, and no adapter starves.

Source of the policy: continuous batching as in Orca (OSDI 22), chunked prefill as in Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Literal

from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.adapter_slots import AdapterSlots, SlotView
from lorafleet.workers.schedule.fair_queue import FairQueue
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.prompts_ahead import computes_prompts
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Flow, Sequence
from lorafleet.workers.schedule.sequence_memory import SequenceMemory
from lorafleet.workers.schedule.slot_claims import SlotClaims
from lorafleet.workers.schedule.state_slots import StateSlots
from lorafleet.workers.schedule.step_budget import PromptAllowance, StepBudget
from lorafleet.workers.schedule.tenant_balance import Favor, find_favor, poorest_first

if TYPE_CHECKING:
    from lorafleet.protocol.engine_control import PauseMode
    from lorafleet.workers.kv_tiers.kv_tiers import KVTiers
    from lorafleet.workers.speculation.speculation import Speculation


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        loras: AdapterSlots | None,
        rope: RopeConfig,
        max_num_seqs: int,
        budget: StepBudget,
        states: StateSlots | None = None,  # None if the model has no recurrent layers
        tiers: KVTiers | None = None,  # None if there are none below the GPU
        speculation: Speculation | None = None,  # None if no tokens are drafted
    ) -> None:
        self.kv = kv
        self.loras = loras
        self.waiting = FairQueue(slot_credit=budget.limits.max_tokens)
        self.running: list[Sequence] = []  # in the order of their start
        self.num_preemptions = 0
        self.pause: PauseMode | Literal[""] = ""  # "keep" schedules nothing; the others start no new sequences
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.speculation = speculation
        self._aside: set[Sequence] = set()  # neither in steps nor waiting for one, see set_aside()
        self._must_yield = False  # a tenant waits for room that could not be made while a step was in flight
        self._rope = rope
        self.memory = SequenceMemory(kv, loras, rope, states, tiers)

    @property
    def has_work(self) -> bool:
        if self.pause:
            return self.pause != "keep" and bool(self.num_started)
        return bool(self.waiting or self.running)

    @property
    def num_beyond_a_step(self) -> int:
        """Number of sequences beyond those that one step can hold; negative if there is room."""
        return len(self.waiting) + len(self._aside) + len(self.running) - self.max_num_seqs

    @property
    def most_in_step(self) -> int:
        """Largest number of sequences in the next step."""
        return min(self.max_num_seqs, len(self.running) + len(self.waiting))

    @property
    def num_started(self) -> int:
        """Number of unfinished sequences that have been in a step."""
        return len(self.running) + self.waiting.num_preempted + len(self._aside)

    @property
    def num_aside(self) -> int:
        """Number of sequences that are neither in steps nor waiting for one."""
        return len(self._aside)

    @property
    def may_preempt(self) -> bool:
        """Whether the next step might run out of blocks, or restart a sequence, and so must know every token of the
        last step."""
        may_restart = self._rope.depends_on_length and any(map(self.memory.must_restart, self.running))
        return self._must_yield or self.memory.might_run_out(self.running) or may_restart

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self, in_flight: Many[Chunk] = ()) -> list[Chunk]:
        """Returns the next step's chunks, in the order of their tokens. `in_flight` are those of a step whose tokens
        are not known yet.

        Decodes without drafts come first, so that attention can handle them separately. There are no chunks if
        everything waits for an adapter.
        """
        for sequence in self.memory.poll():
            self.preempt(sequence)
        if self.pause == "keep":
            return []
        favored = self._favor_a_tenant(in_flight) if self.waiting and not self.pause else None
        chunks, allowance = self._schedule_running(in_flight)
        self.waiting.sort(self.loras.slots.usable_digests if self.loras is not None else ())
        if self.loras is not None:
            self.loras.prefetch(*self.waiting.adapters())
        if self.waiting:
            chunks += self._schedule_waiting(allowance, favored)
        self.memory.before_step(chunks)
        return chunks

    def launched(self, chunks: list[Chunk], num_decodes: int = 0) -> None:
        """Records that the step of these chunks is in flight. The next step goes on behind it.

        Args:
            num_decodes: Chunks at the front that are known to have one token and to sample the next.
        """
        flows = _go_on_behind(chunks, num_decodes)
        self.memory.launched(chunks)
        self.waiting.count_outputs(flows)

    def commit(self, sequence: Sequence, num_known: int) -> None:
        """Publishes the full blocks of the first num_known tokens, which have been computed and are known."""
        self.memory.commit(sequence, num_known)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is, and frees its blocks and its slot."""
        if sequence in self._aside:
            self._aside.remove(sequence)
            self.waiting.ended(sequence)
            return
        self.waiting.finish(sequence)
        if sequence.blocks is not None:
            self.running.remove(sequence)
            self.memory.release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's memory away. It is computed again later, before all that have not started."""
        self._stop(sequence)
        self.waiting.add_preempted(sequence)
        self.num_preemptions += 1

    def set_aside(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the steps until resume().

        It holds no blocks and no slot meanwhile. If its last step was to sample a token, a later step samples it.
        """
        self._stop(sequence)
        if sequence.tokens[-1] == UNKNOWN:
            sequence.tokens.pop()
        self._aside.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Queues the sequence again, before all that wait."""
        self._aside.remove(sequence)
        self.waiting.add_preempted(sequence)

    def _schedule_running(self, in_flight: Many[Chunk]) -> tuple[list[Chunk], PromptAllowance]:
        """Returns the chunks, and the prompt tokens for which the step still has room."""
        decodes: list[Chunk] = []
        drafted: list[Chunk] = []
        prompts: list[Chunk] = []
        unfinished, due = _unfinished(self.running, self.waiting)
        drafts = _chosen_drafts(self, unfinished, in_flight)
        allowance = self.budget.allowance(unfinished, due, self.waiting, sum(map(len, drafts.values())))
        for sequence in unfinished if drafts else due:
            is_decode = sequence.num_uncomputed == 1
            num_tokens = 1 if is_decode else self.memory.until_stop(sequence, allowance.tokens_for(sequence))
            if num_tokens == 0 or sequence.blocks is None:
                continue  # no room, or preempted for an earlier one
            if self._rope.depends_on_length and self.memory.must_restart(sequence):
                sequence.num_rotated = len(sequence.tokens)
                self.preempt(sequence)
                continue
            if not self._grow_or_preempt(sequence, num_tokens, unfinished):
                break  # the sequence itself was the last one
            chunk = self._chunk(sequence, num_tokens)
            if sequence in drafts:
                chunk = self.memory.with_drafts(chunk, drafts[sequence], num_spare=len(self.running))
            if not is_decode:
                prompts.append(chunk)
                allowance.spend(sequence, num_tokens)
            elif chunk.drafts:
                drafted.append(chunk)
            elif drafts or sequence.num_computed >= sequence.decodes_until:
                decodes.append(chunk)
        ready = [] if drafts else _ready(unfinished)  # With those for which no more is due now, in the same order.
        return ready + decodes + drafted + prompts, allowance

    def _schedule_waiting(self, allowance: PromptAllowance, favored: str | None) -> list[Chunk]:
        """Returns chunks of waiting sequences. `favored` is the tenant for whose adapter a slot was freed."""
        chunks: list[Chunk] = []
        claims = SlotClaims(self.loras)
        for sequence in self.waiting.in_start_order(favored):
            is_held = self.pause and not sequence.started_s  # those that have started come first
            if is_held or allowance.is_spent or len(self.running) >= self.max_num_seqs:
                break
            slot = claims.slot_for(sequence)
            if (sequence.lora is not None and slot is None) or self.memory.is_worth_waiting(sequence, self.running):
                continue
            if not self._start(sequence, slot, beside=self.running):
                break  # no blocks: later sequences must not overtake
            if sequence.arrival is not None:
                continue
            num_tokens = self.memory.until_stop(sequence, allowance.tokens_for(sequence))
            if num_tokens == 0:
                break  # its context is long, and a later step has more time
            chunks.append(self._chunk(sequence, num_tokens))
            allowance.spend(sequence, num_tokens)
        return chunks

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Makes a chunk, and publishes the prompt blocks that it computes. They may be shared from now on, even in
        this step.

        For each layer, a step stores all keys and values before it reads any. So n samples compute a prompt once.
        """
        if sequence.num_computed < sequence.num_prompt:
            self.commit(sequence, min(sequence.num_computed + num_tokens, sequence.num_prompt))
        return self.memory.chunk(sequence, num_tokens)

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int, unfinished: list[Sequence]) -> bool:
        """Gets blocks for a sequence, preempting others if needed. Returns False if the sequence itself was preempted.

        `unfinished` is in scheduling order. The last one is preempted first.
        """
        assert sequence.blocks is not None
        while not self.kv.grow(sequence.blocks, sequence.num_computed + sequence.num_unverified + num_tokens):
            last = next(candidate for candidate in reversed(unfinished) if candidate.blocks is not None)
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def _favor_a_tenant(self, in_flight: Many[Chunk]) -> str | None:
        """Starts at most one sequence of a tenant that runs too few. Returns the tenant if only its adapter's slot was
        freed."""
        favor = find_favor(self.running, self.waiting, self.loras, self._has_room)
        self._must_yield = favor is not None and bool(in_flight) and self._might_preempt(favor, in_flight)
        if favor is None or self._must_yield:
            return None
        for victim in reversed(favor.victims):
            self.preempt(victim)
        if favor.head is None:
            return favor.tenant
        # its chunk is scheduled with those of the running sequences
        self._start(favor.head, SlotClaims(self.loras).slot_for(favor.head))
        return None

    def _might_preempt(self, favor: Favor, in_flight: Many[Chunk]) -> bool:
        """Returns whether the favor might preempt a sequence in flight, because it is a victim or because too few
        blocks would be left for those that run."""
        if not {chunk.sequence for chunk in in_flight}.isdisjoint(favor.victims):
            return True
        num_taken = 0 if favor.head is None else self.kv.blocks_for(len(favor.head.tokens))
        return self.memory.might_run_out(self.running, num_taken)

    def _has_room(self, sequence: Sequence) -> bool:
        return self.kv.blocks_for(len(sequence.tokens)) <= self.kv.num_free and len(self.running) < self.max_num_seqs

    def _start(self, sequence: Sequence, slot: SlotView | None, beside: Many[Sequence] = ()) -> bool:
        """Starts a waiting sequence if there is memory for all of its tokens, and for the growth of those `beside`."""
        if not self.memory.take(sequence, slot, beside):
            return False
        if sequence.times is not None and sequence.tier not in ("", "gpu"):
            sequence.times.adapter_s = sequence.times.adapter_s or time.monotonic()
        self.waiting.start(sequence)
        sequence.group.started = True
        sequence.started_s = sequence.started_s or time.monotonic()
        self.running.append(sequence)
        return True

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.memory.release(sequence)
        sequence.num_computed = 0
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []


def _go_on_behind(chunks: list[Chunk], num_decodes: int) -> list[Flow]:
    """Lets the sequences go on behind a step of these chunks. Returns the flow of each token that it samples, if drafts
    are not counted. The arguments are those of Scheduler.launched()."""
    flows: list[Flow] = []
    for chunk in chunks[:num_decodes]:
        sequence = chunk.sequence
        sequence.num_computed += 1
        sequence.tokens.append(UNKNOWN)
        flows.append(sequence.flow)
    for chunk in chunks[num_decodes:]:
        sequence, tokens = chunk.sequence, chunk.sequence.tokens
        sequence.num_computed += chunk.num_tokens - len(chunk.drafts)
        if sequence.num_computed == len(tokens):
            tokens.append(UNKNOWN)
            flows.append(sequence.flow)
    return flows


def _unfinished(running: list[Sequence], waiting: FairQueue) -> tuple[list[Sequence], list[Sequence]]:
    """Returns the sequences that the next step computes tokens of, in the order in which it takes them, and those among
    them for which something may be due besides the computation of the next token. The last token of the others is in
    flight, or may be among the drafts in flight, or they wait for their blocks from a tier."""
    running = running[:] if waiting.has_one_tenant else poorest_first(running)
    due = [sequence for sequence in running if sequence.num_computed >= sequence.decodes_until]
    others = {sequence for sequence in due if sequence.num_remaining <= 0 or sequence.arrival is not None}
    if not others:
        return running, due
    return [sequence for sequence in running if sequence not in others], [s for s in due if s not in others]


def _ready(unfinished: Many[Sequence]) -> list[Chunk]:
    """Returns the chunks of the others."""
    return [s.next_chunk for s in unfinished if s.num_computed < s.decodes_until and s.next_chunk is not None]


def _chosen_drafts(
    scheduler: Scheduler, unfinished: list[Sequence], in_flight: Many[Chunk]
) -> dict[Sequence, list[int]]:
    """Returns the drafts that the next step verifies. Steps that compute prompts have none. Behind a step in flight,
    Speculation.needs_tokens has seen to that."""
    if scheduler.speculation is None or (not in_flight and computes_prompts(scheduler)):
        return {}
    return scheduler.speculation.choose(unfinished, scheduler.most_in_step, is_behind=bool(in_flight))
