"""Gives a sequence the memory that it holds while it runs, and takes it back: its KV blocks and its adapter's slot.

A start leaves some blocks free for the sequences that run. Otherwise the last one to start would be preempted a few
steps later, and its prompt computed twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.adapter_slots import AdapterSlots, SlotView
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.slots.activation import first_adapted

BASE_SALT = ""  # for keys and values without an adapter
SPARE_TOKENS = 64  # answer tokens of each running sequence for which a start leaves blocks free
SPARE_SHARE = 32  # one block in this many is the most that a start leaves free


class SequenceMemory:
    def __init__(self, kv: KVCacheManager, loras: AdapterSlots | None, rope: RopeConfig) -> None:
        self._kv = kv
        self._loras = loras
        self._rope = rope

    def take(self, sequence: Sequence, slot: SlotView | None, beside: Iterable[Sequence] = ()) -> bool:
        """Gives the sequence its slot, the cached blocks of its prefix, and free blocks for all of its other tokens.

        Returns False and gives nothing if too few blocks are free, so that a prompt does not start only to be
        preempted.

        Args:
            beside: Running sequences for whose growth blocks must be left.
        """
        if slot is not None and slot.adapter is not None and slot.adapter.info.invocation_tokens:
            prompt = sequence.tokens[: sequence.num_prompt]
            sequence.first_adapted = first_adapted(prompt, slot.adapter.info.invocation_tokens)
        digest = sequence.lora.digest if sequence.lora is not None else BASE_SALT
        blocks = self._kv.open(
            self._cache_salt(sequence, digest), self._cache_salt(sequence, BASE_SALT), sequence.first_adapted
        )
        prefix, num_tokens = None, len(sequence.tokens)
        if sequence.reuses_prefixes:
            prefix = self._kv.find_prefix(blocks, sequence.tokens, sequence.prefix)
        if not self._leaves_enough(self._kv.num_left(num_tokens, prefix), beside):
            if prefix is not None:
                self._kv.refresh(prefix)
            self._kv.release(blocks)
            sequence.prefix = prefix  # so that the next attempt need not look it up again
            return False
        num_cached = 0 if prefix is None else self._kv.reuse_prefix(blocks, sequence.tokens, prefix)
        has_grown = self._kv.grow(blocks, num_tokens)
        assert has_grown
        sequence.prefix = None
        sequence.blocks = blocks
        sequence.num_computed = num_cached
        if sequence.num_generated == 0:
            sequence.num_cached = num_cached
        if slot is not None:
            assert self._loras is not None
            self._loras.slots.hold(slot.index, sequence.tenant)
            sequence.slot = slot.index
        return True

    def release(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        self._kv.release(sequence.blocks)
        sequence.blocks = None
        if sequence.slot is not None and self._loras is not None:
            self._loras.slots.let_go(sequence.slot)
            sequence.slot = None

    def _leaves_enough(self, num_left: int, beside: Iterable[Sequence]) -> bool:
        """Returns whether these many free blocks suffice for the next tokens of the sequences that run."""
        num_spare = self._kv.num_blocks // SPARE_SHARE
        if not 0 <= num_left < num_spare:
            return num_left >= 0
        num_needed = sum(
            self._kv.num_missing(running.blocks, len(running.tokens) + min(SPARE_TOKENS, running.num_remaining))
            for running in beside
            if running.blocks is not None
        )
        return num_left >= min(num_spare, num_needed)

    def _cache_salt(self, sequence: Sequence, digest: str) -> Hashable:
        """Returns everything besides the tokens that blocks must have in common to be shared.

        Keys and values depend on the adapter, and under some rope scalings on the sequence's length too. Nobody may
        find out from a prompt's latency that another tenant has sent it.
        """
        if not self._rope.depends_on_length:
            return sequence.cache_salt, digest
        return sequence.cache_salt, digest, self._rope.key_variant(sequence.num_rotated, len(sequence.tokens))
