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
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from operator import itemgetter

from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.adapter_slots import AdapterSlots, SlotView
from lorafleet.workers.schedule.fair_queue import FairQueue
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.slots.activation import first_adapted

BASE_SALT = ""  # for keys and values without an adapter
PREFETCH_SCAN = 1024  # heads of the queue that are examined for adapters to load ahead


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next num_tokens of one sequence, from num_computed on."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next one is sampled."""
        return self.num_tokens == self.sequence.num_uncomputed


class Scheduler:
    def __init__(
        self,
        kv: KVCacheManager,
        loras: AdapterSlots | None,
        rope: RopeConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_mixed_tokens: int,
    ) -> None:
        self.kv = kv
        self.loras = loras
        self.waiting = FairQueue(slot_credit=max_num_batched_tokens)
        self.running: list[Sequence] = []
        self._aside: set[Sequence] = set()
        self.num_preemptions = 0
        self.max_num_seqs = max_num_seqs
        self._must_yield = False  # a tenant waits for room that could not be made while a step was in flight
        self._rope = rope
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_mixed_tokens = max_num_mixed_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_beyond_a_step(self) -> int:
        """Number of sequences beyond those that one step can hold; negative if there is room."""
        return len(self.waiting) + len(self._aside) + len(self.running) - self.max_num_seqs

    @property
    def num_aside(self) -> int:
        """Number of sequences that are neither in steps nor waiting for one."""
        return len(self._aside)

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> list[Chunk]:
        """Returns the next step's chunks, in the order of their tokens.

        Decodes come first, so that attention can handle them separately. There are no chunks if everything waits for
        an adapter.
        """
        favored = self._favor_a_tenant() if self.waiting else None
        chunks, budget = self._schedule_running()
        self.waiting.sort(self.loras.slots.digests if self.loras is not None else ())
        if self.loras is not None:
            self.loras.prefetch(*self.waiting_adapters())
        if self.waiting:
            chunks += self._schedule_waiting(budget, favored)
        return chunks

    @property
    def may_preempt(self) -> bool:
        """Whether the next step might run out of blocks, or restart a sequence, and so must know every token of the
        last step."""
        if self._must_yield or self.kv.num_free < len(self.running):
            return True
        return self._rope.depends_on_length and any(self._turns_anew(sequence) for sequence in self.running)

    def launched(self, chunk: Chunk) -> None:
        """Records that the chunk's step is in flight. The next step goes on behind it."""
        chunk.sequence.num_computed += chunk.num_tokens
        if chunk.sequence.num_uncomputed == 0:
            chunk.sequence.tokens.append(UNKNOWN)
            self.waiting.count_output(chunk.sequence)

    def commit(self, sequence: Sequence, num_known: int) -> None:
        """Publishes the full blocks of the first num_known tokens, which have been computed and are known."""
        assert sequence.blocks is not None
        self.kv.commit(sequence.blocks, sequence.tokens, num_known)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is, and frees its blocks and its slot."""
        if sequence in self._aside:
            self._aside.remove(sequence)
            self.waiting.ended(sequence)
            return
        self.waiting.finish(sequence)
        if sequence.blocks is not None:
            self.running.remove(sequence)
            self._release(sequence)

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

    def _schedule_running(self) -> tuple[list[Chunk], int]:
        """Returns the chunks, and the number of prompt tokens for which the step still has room."""
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        # The last token of the others is already in flight.
        unfinished = [s for s in self._poorest_first() if s.num_generated < s.max_tokens]
        budget = self._prompt_budget(sum(s.num_uncomputed == 1 for s in unfinished))
        for sequence in unfinished:
            is_decode = sequence.num_uncomputed == 1
            num_tokens = 1 if is_decode else min(sequence.num_uncomputed, budget)
            if num_tokens == 0 or sequence.blocks is None:
                continue  # no room, or preempted for an earlier one
            if self._turns_anew(sequence):
                sequence.num_rotated = len(sequence.tokens)
                self._preempt(sequence)
                continue
            if not self._grow_or_preempt(sequence, num_tokens, unfinished):
                break  # the sequence itself was the last one
            (decodes if is_decode else prompts).append(self._chunk(sequence, num_tokens))
            budget -= 0 if is_decode else num_tokens
        return decodes + prompts, budget

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Makes a chunk, and publishes the prompt blocks that it computes. They may be shared from now on, even in
        this step.

        For each layer, a step stores all keys and values before it reads any. So n samples of one prompt compute it
        once.
        """
        end = min(sequence.num_computed + num_tokens, sequence.num_prompt)
        if sequence.num_computed < end:
            self.commit(sequence, end)
        return Chunk(sequence, num_tokens)

    def _prompt_budget(self, num_decodes: int) -> int:
        """Returns the number of tokens left for prompts.

        Beside decodes, it is what they leave of a mixed step, but at least half of one, as far as the step has room.
        """
        room = self._max_num_batched_tokens - num_decodes
        if num_decodes == 0:
            return room
        return min(room, max(self._max_num_mixed_tokens - num_decodes, -(-self._max_num_mixed_tokens // 2)))

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int, unfinished: list[Sequence]) -> bool:
        """Gets blocks for a sequence, preempting others if needed. Returns False if the sequence itself was preempted.

        `unfinished` is in scheduling order. The last one is preempted first.
        """
        assert sequence.blocks is not None
        while not self.kv.grow(sequence.blocks, sequence.num_computed + num_tokens):
            last = next(one for one in reversed(unfinished) if one.blocks is not None)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _poorest_first(self) -> list[Sequence]:
        """Returns the running sequences, those of tenants that run fewest first, otherwise in the order of their
        start."""
        numbers = Counter(one.tenant for one in self.running)
        return sorted(self.running, key=lambda one: numbers[one.tenant]) if len(numbers) > 1 else list(self.running)

    def _favor_a_tenant(self) -> str | None:
        """Starts a sequence of a tenant that waits while another runs more sequences than it would even then.

        The other tenant's sequences are preempted if there is no room. Returns the tenant if that made room for an
        adapter that has no slot yet. At most one sequence starts per step. In time all tenants run equally many, as
        far as they request as many.
        """
        self._must_yield = False
        numbers = Counter(one.tenant for one in self.running)
        richest, most = max(numbers.items(), key=itemgetter(1), default=("", 0))
        tenants = self.waiting.waiting_tenants()
        if all(most <= numbers[tenant] + 1 for tenant in tenants):
            return None
        claimed: set[int] = set()
        for tenant in tenants:
            heads = self.waiting.heads_of(tenant)
            head = self._first_at_hand(heads, claimed)
            if most <= numbers[tenant] + 1:
                continue
            if head is None:
                victims = self._holders_of_a_slot_for(heads, numbers)
                if not victims:
                    continue
            elif self._has_room(head):
                victims = []
            else:
                victims = [next(one for one in reversed(self.running) if one.tenant == richest)]
            if any(one.tokens[-1] == UNKNOWN for one in victims):
                self._must_yield = True
                return None
            for victim in reversed(victims):
                self._preempt(victim)
            if head is None:
                return tenant
            # its chunk is scheduled with those of the running sequences
            self._admit(head, self._slot_for(head, set(), set()))
            return None
        return None

    def _first_at_hand(self, heads: list[Sequence], claimed: set[int]) -> Sequence | None:
        """Returns the first head that needs no slot, or whose adapter is in a slot.

        `claimed` has the slots that drain for earlier sequences. Those that drain for skipped heads are added to it.
        """
        for head in heads:
            if head.lora is None or self.loras is None:
                return head
            slot = self.loras.slots.find(head.lora.digest)
            if slot is None:
                claimed |= self.loras.claims(head.lora.digest, claimed, head.tenant)
            elif slot.index not in claimed and slot.is_ready:
                return head
        return None

    def _holders_of_a_slot_for(self, heads: list[Sequence], numbers: Counter[str]) -> list[Sequence]:
        """Returns the running sequences that hold the slot that one of the heads would take next, if all of their
        tenants run more than the head's."""
        assert self.loras is not None
        for head in heads:
            assert head.lora is not None
            if self.loras.slots.find(head.lora.digest) is not None:
                continue  # its slot is being filled
            claimed = self.loras.claims(head.lora.digest, set(), head.tenant)
            holders = [one for one in self.running if one.slot in claimed]
            if holders and all(numbers[one.tenant] > numbers[head.tenant] + 1 for one in holders):
                return holders
        return []

    def _has_room(self, sequence: Sequence) -> bool:
        fits = self.kv.blocks_for(len(sequence.tokens)) <= self.kv.num_free
        return fits and len(self.running) < self.max_num_seqs

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self.waiting.add_preempted(sequence)
        self.num_preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []

    def _release(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        self.kv.release(sequence.blocks)
        sequence.blocks = None
        if sequence.slot is not None and self.loras is not None:
            self.loras.slots.let_go(sequence.slot)
            sequence.slot = None

    def _schedule_waiting(self, budget: int, favored: str | None) -> list[Chunk]:
        """Returns chunks of waiting sequences. `favored` is the tenant for whose adapter a slot was freed."""
        chunks: list[Chunk] = []
        blocked: set[str] = set()  # adapters that this pass has found without a usable slot
        claimed: set[int] = set()  # slots that drain for an earlier request
        turns = self.waiting.turns(favored)
        while budget > 0 and len(self.running) < self.max_num_seqs and (sequence := next(turns, None)) is not None:
            slot = self._slot_for(sequence, blocked, claimed)
            if sequence.lora is not None and slot is None:
                continue
            if not self._admit(sequence, slot):
                break  # no blocks: later sequences must not overtake
            chunks.append(self._chunk(sequence, min(sequence.num_uncomputed, budget)))
            budget -= chunks[-1].num_tokens
        return chunks

    def _slot_for(self, sequence: Sequence, blocked: set[str], claimed: set[int]) -> SlotView | None:
        lora = sequence.lora
        if lora is None or lora.digest in blocked:
            return None
        assert self.loras is not None, "requests with adapters are refused where LoRA is off"
        slot = self.loras.slot_for(lora)
        if slot is None:
            claimed |= self.loras.claims(lora.digest, claimed, sequence.tenant)
        if slot is None or slot.index in claimed or not slot.is_ready:
            blocked.add(lora.digest)
            return None
        return slot

    def _admit(self, sequence: Sequence, slot: SlotView | None) -> bool:
        """Starts a sequence if there is room for all of its tokens, so that a prompt does not start only to be
        preempted."""
        if slot is not None and slot.adapter is not None and slot.adapter.info.invocation_tokens:
            prompt = sequence.tokens[: sequence.num_prompt]
            sequence.first_adapted = first_adapted(prompt, slot.adapter.info.invocation_tokens)
        digest = sequence.lora.digest if sequence.lora is not None else BASE_SALT
        blocks = self.kv.open(
            self._cache_salt(sequence, digest), self._cache_salt(sequence, BASE_SALT), sequence.first_adapted
        )
        cached = self.kv.reuse_prefix(blocks, sequence.tokens) if sequence.reuses_prefixes else 0
        if not self.kv.grow(blocks, len(sequence.tokens)):
            self.kv.release(blocks)
            return False
        if sequence.times is not None and sequence.tier not in ("", "gpu"):
            sequence.times.adapter_s = sequence.times.adapter_s or time.monotonic()
        sequence.blocks = blocks
        sequence.num_computed = cached
        self.waiting.start(sequence)
        sequence.group.started = True
        sequence.started_s = sequence.started_s or time.monotonic()
        if sequence.num_generated == 0:
            sequence.num_cached = cached
        if slot is not None:
            assert self.loras is not None
            self.loras.slots.hold(slot.index, sequence.tenant)
            sequence.slot = slot.index
        self.running.append(sequence)
        return True

    def _cache_salt(self, sequence: Sequence, digest: str) -> Hashable:
        """Returns everything besides the tokens that blocks must have in common to be shared.

        Keys and values depend on the adapter, and under some rope scalings on the sequence's length too. Nobody may
        find out from a prompt's latency that another tenant has sent it.
        """
        if not self._rope.depends_on_length:
            return sequence.cache_salt, digest
        return sequence.cache_salt, digest, self._rope.key_variant(sequence.num_rotated, len(sequence.tokens))

    def _turns_anew(self, sequence: Sequence) -> bool:
        return self._rope.turns_anew(sequence.num_rotated, len(sequence.tokens))

    def waiting_adapters(self) -> tuple[list[LoRARequest], dict[str, str]]:
        """Returns the distinct adapters that requests wait for, in queue order, and by digest the tenant whose request
        is first."""
        found: dict[str, LoRARequest] = {}
        tenants: dict[str, str] = {}
        for sequence in self.waiting.heads()[:PREFETCH_SCAN]:
            if sequence.lora is not None:
                found.setdefault(sequence.lora.digest, sequence.lora)
                tenants.setdefault(sequence.lora.digest, sequence.tenant)
        return list(found.values()), tenants
