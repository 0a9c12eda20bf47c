"""Gives a sequence the memory that it holds while it runs, and takes it back: KV blocks, adapter slot, state slot.

If the model has recurrent layers, cached keys and values are of use only up to a snapshot of the state behind them.

A start leaves some blocks free for the sequences that run. Otherwise the last one to start would be preempted a few
steps later, and its prompt computed twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.schedule.adapter_slots import AdapterSlots, SlotView
from lorafleet.workers.schedule.kv_cache import KVCacheManager, PrefixMatch
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.schedule.snapshot_policy import SnapshotPolicy
from lorafleet.workers.schedule.state_slots import StateSlots
from lorafleet.workers.slots.activation import first_adapted

if TYPE_CHECKING:
    from lorafleet.workers.kv_events.block_events import BlockEvents
    from lorafleet.workers.kv_tiers.kv_tiers import KVTiers

BASE_SALT = ""  # for keys and values without an adapter
SPARE_TOKENS = 64  # answer tokens of each running sequence for which a start leaves blocks free
SPARE_SHARE = 32  # one block in this many is the most that a start leaves free


class SequenceMemory:
    def __init__(
        self,
        kv: KVCacheManager,
        loras: AdapterSlots | None,
        rope: RopeConfig,
        states: StateSlots | None,
        tiers: KVTiers | None = None,
    ) -> None:
        self._kv = kv
        self._loras = loras
        self._rope = rope
        self._states = states
        self.events: BlockEvents | None = None  # None if no KV events are published.
        self.tiers = tiers  # None if there are none below the GPU
        self.snapshots: SnapshotPolicy | None = None  # None without recurrent layers, or without a prefix cache
        if states is not None and kv.enable_prefix_caching:
            assert states.snapshots is not None, "cached keys and values come without the state behind them"
            self.snapshots = SnapshotPolicy(states.snapshots, kv.block_size)
            pool = states.snapshots
            if tiers is None:
                kv.on_forget = lambda node, _block: pool.forget(node)

    def take(self, sequence: Sequence, slot: SlotView | None, beside: Iterable[Sequence] = ()) -> bool:
        """Gives the sequence its slots, the cached blocks of its prefix, and free blocks for all of its other tokens.

        Returns False and gives nothing if too few blocks are free, so that a prompt does not start only to be
        preempted.

        Args:
            beside: Running sequences for whose growth blocks must be left.
        """
        if slot is not None and slot.adapter is not None and slot.adapter.info.invocation_tokens:
            prompt = sequence.tokens[: sequence.num_prompt]
            sequence.first_adapted = first_adapted(prompt, slot.adapter.info.invocation_tokens)
        blocks = self._kv.open(
            _cache_salt(sequence, sequence.digest, self._rope),
            _cache_salt(sequence, BASE_SALT, self._rope),
            sequence.first_adapted,
        )
        prefix, num_tokens = None, len(sequence.tokens)
        if sequence.reuses_prefixes:
            prefix = self._kv.find_prefix(blocks, sequence.tokens, sequence.prefix)
        reused = self._resumable(prefix)
        if not _leaves_enough(self._kv, self._kv.num_left(num_tokens, reused), beside):
            if prefix is not None:
                self._kv.refresh(prefix)
            self._kv.release(blocks)
            sequence.prefix = prefix  # so that the next attempt need not look it up again
            return False
        num_cached, returns = 0, None
        if prefix is not None and reused is not None:
            num_reused = len(reused.table)
            if self.tiers is not None:
                returns = self.tiers.find_state(sequence, blocks, prefix.nodes, num_reused)
                num_reused = num_reused if returns is None else returns.num_reused
            num_cached = self._kv.reuse_prefix(blocks, sequence.tokens, prefix, num_reused)
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
        if self._states is not None:
            sequence.state_slot = self._states.take()
        num_known = 0 if prefix is None else len(prefix.nodes)
        if returns is not None:
            sequence.num_computed = returns.num_blocks * self._kv.block_size
            num_known = returns.num_known
        if self.snapshots is not None:
            self.snapshots.start(sequence, num_known, is_here=returns is None)
        if self.tiers is not None:
            self.tiers.started(sequence, returns)
        return True

    def may_take(self, sequence: Sequence, beside: Iterable[Sequence]) -> bool:
        """Returns whether take() might give the sequence its memory, by what it found when it was last called for the
        sequence."""
        num_tokens, prefix = len(sequence.tokens), sequence.prefix
        if prefix is None and sequence.reuses_prefixes:
            return self._kv.num_left(num_tokens) >= 0
        return _leaves_enough(self._kv, self._kv.num_left(num_tokens, self._resumable(prefix)), beside)

    def release(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        if self.tiers is not None:
            self.tiers.stopped(sequence)
        self._kv.release(sequence.blocks)
        sequence.blocks = sequence.next_chunk = None
        sequence.decodes_until = sequence.quiet_until = sequence.num_unverified = 0
        if sequence.slot is not None and self._loras is not None:
            self._loras.slots.let_go(sequence.slot)
            sequence.slot = None
        if self._states is not None:
            self._states.release(sequence)
        if self.snapshots is not None:
            self.snapshots.end(sequence)

    def is_worth_waiting(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Returns whether a waiting sequence should start later, since a running one is about to compute a state from
        which it could resume, or gets blocks from a tier that it could share."""
        if self.tiers is not None and self.tiers.is_worth_waiting(sequence, running):
            return True
        return self.snapshots is not None and self.snapshots.is_worth_waiting(sequence, running)

    def poll(self) -> list[Sequence]:
        """Takes in what the tiers below the GPU have done since the last step. Returns the running sequences that must
        start again, since the tiers have lost what they wait for."""
        return [] if self.tiers is None else self.tiers.poll()

    def before_step(self, chunks: Many[Chunk]) -> None:
        """Saves the content of blocks that the step of these chunks overwrites, if there is a tier for it."""
        if self.tiers is not None:
            self.tiers.before_step(chunks)

    @property
    def is_unused(self) -> bool:
        """Whether neither a sequence nor a copy from a tier uses the GPU's blocks and snapshots."""
        is_loading = self.tiers is not None and self.tiers.states is not None and self.tiers.states.is_loading
        return self._kv.num_free == self._kv.num_blocks and not is_loading

    def leave_gpu(self) -> None:
        """Forgets the content of all blocks and snapshots on the GPU, which no sequence uses. The tiers below keep what
        they have room for."""
        self._kv.flush()
        if self.tiers is not None:
            self.tiers.save_all()

    def flush(self) -> None:
        """Forgets the content of all blocks that no sequence uses, in all tiers."""
        self._kv.flush()
        if self.tiers is not None:
            self.tiers.clear()

    def close(self) -> None:
        if self.events is not None:
            self.events.publisher.close()
        if self.tiers is not None:
            self.tiers.close()

    def until_stop(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns the number of a prompt's next tokens, at most num_tokens, that the next chunk may have."""
        return num_tokens if self.snapshots is None else self.snapshots.until_stop(sequence, num_tokens)

    def with_drafts(self, chunk: Chunk, drafts: Many[int], num_spare: int) -> Chunk:
        """Returns the chunk with as many of the drafts behind it as there is memory for. They take no more free blocks
        than leave num_spare."""
        sequence, blocks = chunk.sequence, chunk.sequence.blocks
        assert blocks is not None
        start = sequence.num_computed + sequence.num_unverified + chunk.num_tokens
        sequence.decodes_until = 0  # The next step may have to look for blocks.
        if self.snapshots is not None:
            drafts = drafts[: self.snapshots.drafts_until_stop(chunk.sequence, start)]
        num_missing = self._kv.num_missing(blocks, start + len(drafts))
        if num_missing > 0:
            if num_missing + num_spare <= self._kv.num_free:
                self._kv.grow(blocks, start + len(drafts))
            drafts = drafts[: len(blocks.table) * self._kv.block_size - start]
        if self._states is not None:
            drafts = drafts[: self._states.draft(sequence, len(drafts))]
        num_tokens = chunk.num_tokens + len(drafts)
        return Chunk(chunk.sequence, num_tokens, chunk.resumes_from, chunk.snapshot, drafts)

    def might_run_out(self, running: Many[Sequence], num_taken: int = 0) -> bool:
        """Returns whether the running sequences may need more blocks in the next step than are free beside num_taken.

        A sequence starts with blocks for all of its tokens. So it needs a block, and no more than one, only if its
        newest token is the first of a block, or may lie behind the drafts in flight.
        """
        num_left = self._kv.num_free - num_taken
        if num_left >= len(running):
            return False
        return num_left < sum(
            self._kv.num_missing(sequence.blocks, len(sequence.tokens) + sequence.num_unverified)
            for sequence in running
            if sequence.blocks is not None and sequence.num_remaining > 0
        )

    def awaits_snapshot(self, running: Many[Sequence]) -> bool:
        """Returns whether the next step may take a snapshot of a state that depends on the drafts in flight."""
        snapshots = self.snapshots
        return snapshots is not None and any(own.num_unverified and snapshots.is_due(own) for own in running)

    def chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        if self._states is not None:
            self._states.go_behind(sequence)
        if self.snapshots is not None:
            return self.snapshots.chunk(sequence, num_tokens)
        if num_tokens > 1:
            return Chunk(sequence, num_tokens)
        if sequence.next_chunk is None:
            sequence.next_chunk = Chunk(sequence, 1)
        is_decode = sequence.num_generated > 0 and sequence.num_uncomputed == 1
        if is_decode and sequence.blocks is not None and not self._rope.depends_on_length:
            num_held = len(sequence.blocks.table) * self._kv.block_size
            sequence.decodes_until = min(num_held, sequence.last_end)
        return sequence.next_chunk

    def quiet_until(self, num_known: int) -> int:
        """Returns up to which number of known tokens commit() has nothing to do, once it has been called for
        num_known."""
        size = self._kv.block_size
        return 0 if self.snapshots is not None else (num_known // size + 1) * size

    def launched(self, chunks: Many[Chunk]) -> None:
        """Records that the step of these chunks is in flight, and that their sequences go on behind it."""
        if self.snapshots is not None:
            for chunk in chunks:
                self.snapshots.launched(chunk)

    def verified(self, sequence: Sequence, num_accepted: int) -> None:
        """Records how many drafts of a step were accepted. The sequence goes on with the state behind them."""
        if self._states is not None:
            self._states.verified(sequence, num_accepted)

    def must_restart(self, sequence: Sequence) -> bool:
        """Returns whether a sequence is now so long that all of its keys must be rotated differently."""
        return self._rope.turns_anew(sequence.num_rotated, len(sequence.tokens))

    def commit(self, sequence: Sequence, num_known: int) -> None:
        """Publishes the full blocks of the first num_known tokens, and the snapshot behind one of them."""
        assert sequence.blocks is not None
        if num_known // self._kv.block_size > len(sequence.blocks.nodes):
            self._kv.commit(sequence.blocks, sequence.tokens, num_known)
        if self.snapshots is not None:
            self.snapshots.publish(sequence)

    def step_ended(self) -> None:
        """Publishes the KV events of a step."""
        if self.events is not None:
            self.events.step_ended()

    def _resumable(self, prefix: PrefixMatch | None) -> PrefixMatch | None:
        """Returns the part of a known prefix from whose end a sequence can go on."""
        if prefix is None or self.snapshots is None:
            return prefix
        return prefix.first(self.snapshots.pool.num_resumable(prefix.nodes))


def _cache_salt(sequence: Sequence, digest: str, rope: RopeConfig) -> Hashable:
    """Returns everything besides the tokens that blocks must have in common to be shared.

    Keys and values depend on the base's weights, on the adapter, and under some rope scalings on the sequence's length
    too. Nobody may find out from a prompt's latency that another tenant has sent it.
    """
    salt = sequence.cache_salt, digest, sequence.base.digest
    if not rope.depends_on_length:
        return salt
    return *salt, rope.key_variant(sequence.num_rotated, len(sequence.tokens))


def _leaves_enough(kv: KVCacheManager, num_left: int, beside: Iterable[Sequence]) -> bool:
    """Returns whether these many free blocks suffice for the next tokens of the sequences that run."""
    num_spare = kv.num_blocks // SPARE_SHARE
    if not 0 <= num_left < num_spare:
        return num_left >= 0
    num_needed = sum(
        kv.num_missing(running.blocks, len(running.tokens) + min(SPARE_TOKENS, running.num_remaining))
        for running in beside
        if running.blocks is not None
    )
    return num_left >= min(num_spare, num_needed)
