"""Extends the prefix cache below the GPU: KV blocks that leave it go to host memory, then to disk, and come back.

Snapshots of recurrent states go with them (state_tiers.py). It belongs to rank 0's engine loop and never blocks it. The
scheduler calls it at three places: when a sequence has got its memory, before each step, and when a sequence gives its
memory back.

Source of the idea: CachedAttention, Gao et al., USENIX ATC 2024.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from lorafleet.protocol.messages import KVTierStats
from lorafleet.workers.kv_tiers.arrivals import Arrivals
from lorafleet.workers.kv_tiers.block_movers import staging_rows
from lorafleet.workers.kv_tiers.block_names import BlockNames, block_name
from lorafleet.workers.kv_tiers.disk_jobs import DiskJobs
from lorafleet.workers.kv_tiers.leaving_blocks import LeavingBlocks, written_blocks
from lorafleet.workers.kv_tiers.state_tiers import StateArrival, StateTiers
from lorafleet.workers.kv_tiers.stored_blocks import StoredBlock, StoredBlocks
from lorafleet.workers.kv_tiers.tier_counts import TierCounts
from lorafleet.workers.kv_tiers.tier_orders import TierOrders
from lorafleet.workers.schedule.kv_cache import KVCacheManager, SequenceBlocks
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.weak_method import weak

LEAST_TOKENS = 64  # a step computes fewer tokens sooner than they arrive


@dataclass(frozen=True, slots=True)
class Return:
    """The part of a prompt behind which a snapshot is in the tiers."""

    num_reused: int  # Number of its blocks that are on the GPU.
    coming: list[StoredBlock]  # The blocks behind them, from the tiers.
    state: StateArrival  # The snapshot behind these.
    num_known: int  # Number of the prompt's first blocks that are on the GPU or in the tiers.

    @property
    def num_blocks(self) -> int:
        return self.num_reused + len(self.coming)


class KVTiers:
    """The tiers of one engine, whose prefix cache is `kv`.

    Args:
        num_host: Number of slots of the host tier.
        num_disk: Number of slots of the disk tier; 0 without one.
        clock: time.monotonic, except in tests.
        states: None without recurrent layers.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        orders: TierOrders,
        num_host: int,
        num_disk: int,
        clock: Callable[[], float] = time.monotonic,
        states: StateTiers | None = None,
    ) -> None:
        self.counts = TierCounts()
        self.stored = StoredBlocks(num_host, num_disk)
        self.disk = DiskJobs(self.stored, orders, self.counts, writes=num_disk > 0)
        self.states = states
        self._kv = kv
        self._orders = orders
        self._names = BlockNames()
        num_ahead = staging_rows(orders.slot_bytes)
        self._leaving = LeavingBlocks(self.stored, orders, self.counts, num_ahead)
        self._arrivals = Arrivals(kv, self.stored, orders, self.disk, self._leaving, self.counts, clock, states)
        kv.on_known = self._names.known
        kv.on_forget = weak(self._forgotten)
        if states is not None:
            states.pool.on_evict = weak(self._evicted)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier over all ranks, full or not."""
        return sum(stored.host_slots * num_bytes for stored, _, num_bytes in self._contents())

    def stats(self) -> KVTierStats:
        num_bytes, moved, evictions, lost = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        for stored, counts, slot_bytes in self._contents():
            num_bytes.update(host=stored.num_host * slot_bytes, disk=stored.num_disk * slot_bytes)
            moved.update({way: count * slot_bytes for way, count in counts.moved_blocks.items()})
            evictions.update(stored.num_evictions)
            lost.update(counts.lost_blocks)
        return KVTierStats(
            num_bytes=dict(num_bytes),
            hit_tokens_total=dict(self.counts.hit_tokens),
            moved_bytes_total=dict(moved),
            evictions_total=dict(evictions),
            lost_blocks_total=dict(lost),
            disk_takes_blocks=int(self.disk.writes and (self.states is None or self.states.disk.writes)),
        )

    def find_state(
        self, sequence: Sequence, blocks: SequenceBlocks, nodes: Many[int], num_resumable: int
    ) -> Return | None:
        """Finds the longest part of a prompt with a snapshot in the tiers, and reserves a slot on the GPU for it.

        Returns None if there is none that is worth waiting for. Pass the result to started().

        Args:
            nodes: Nodes of all blocks at its beginning that are known on the GPU.
            num_resumable: Number of them that a snapshot on the GPU follows.
        """
        if self.states is None or sequence.avoids_tiers:
            return None
        found = self._find(blocks, nodes, sequence.tokens)
        names = [self._names.of(node) for node in nodes] + [block.name for block in found]
        least = num_resumable + -(-LEAST_TOKENS // self._kv.block_size)
        for count in range(len(names), least - 1, -1):
            name = names[count - 1]
            stored = None if name is None else self.states.stored.find(name)
            if stored is None:
                continue
            state = self.states.reserve(stored)
            if state is None:
                return None
            num_reused = min(count, len(nodes))
            return Return(num_reused, found[: count - num_reused], state, len(names))
        return None

    def started(self, sequence: Sequence, returns: Return | None = None) -> None:
        """Brings back what the tiers have of a sequence that has just got its memory. Sets sequence.arrival if that is
        worth waiting for.

        Args:
            returns: What find_state() has found.
        """
        assert sequence.blocks is not None
        if returns is not None:
            self._arrivals.begin(sequence, returns.num_reused, returns.coming, returns.state)
        if self.states is not None or not sequence.reuses_prefixes:
            return
        coming = self._find(sequence.blocks, sequence.blocks.nodes, sequence.tokens)
        size = self._kv.block_size
        if len(coming) * size >= LEAST_TOKENS:
            first = sequence.num_computed // size
            sequence.num_computed += len(coming) * size
            self._arrivals.begin(sequence, first, coming)

    def stopped(self, sequence: Sequence) -> None:
        """Records that a sequence is about to give its blocks back."""
        if sequence.arrival is not None:
            self._arrivals.abandon(sequence)

    def poll(self) -> list[Sequence]:
        """Takes in what has ended. Call it before each step is scheduled. Returns the running sequences that must start
        again, without the tiers."""
        self.disk.poll()
        if self.states is not None:
            self.states.poll()
        failed = self._arrivals.poll()
        for sequence in failed:
            sequence.avoids_tiers = True
        self.disk.write_behind()
        return failed

    def before_step(self, chunks: Many[Chunk]) -> None:
        """Saves what the step of these chunks overwrites. Call it before the step is launched."""
        self._leaving.before_step(written_blocks(chunks, self._kv.block_size))
        if self.states is not None:
            self.states.before_step(chunks)

    def is_worth_waiting(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Returns whether blocks arrive for a running sequence that a waiting one can share soon."""
        return sequence.reuses_prefixes and any(self._will_share(other, sequence) for other in running)

    def save_now(self, blocks: Iterable[int]) -> None:
        """Saves the content of forgotten blocks, as far as there is room, before their memory is used for something
        else."""
        self._leaving.save(blocks)

    def save_all(self) -> None:
        """Saves all that was forgotten and whose content is still on the GPU, as far as there is room."""
        self._leaving.save_all()
        if self.states is not None:
            self.states.leaving.save_all()

    def clear(self) -> None:
        """Forgets all that is in the tiers."""
        self._leaving.clear()
        self.stored.clear()
        if self.states is not None:
            self.states.clear()

    def close(self) -> None:
        self._orders.close()
        if self.states is not None:
            self.states.orders.close()

    def _contents(self) -> list[tuple[StoredBlocks, TierCounts, int]]:
        """Returns the blocks and the snapshots: what is stored, its counts, and the bytes of a slot over all ranks."""
        contents = [(self.stored, self.counts, self._orders)]
        if self.states is not None:
            contents.append((self.states.stored, self.states.counts, self.states.orders))
        return [(stored, counts, orders.slot_bytes * orders.num_ranks) for stored, counts, orders in contents]

    def _forgotten(self, node: int, block: int) -> None:
        if self.states is not None:
            self.states.pool.evict(node)  # while the node still has its name
        name = self._names.forget(node)
        if name is not None:
            self._leaving.leave(name, block)

    def _evicted(self, node: int, slot: int) -> None:
        name = self._names.of(node)
        if self.states is not None and name is not None:
            self.states.leaving.leave(name, slot)

    def _find(self, blocks: SequenceBlocks, nodes: Many[int], tokens: Many[int]) -> list[StoredBlock]:
        """Returns the blocks of the tiers that continue a sequence's known ones. The last token is left to compute."""
        size = self._kv.block_size
        found: list[StoredBlock] = []
        name = self._names.last_of(nodes)
        for index in range(len(nodes), (len(tokens) - 1) // size):
            if name is None:
                break
            name = block_name(name, self._kv.salt_of(blocks, index), tokens[index * size : (index + 1) * size])
            stored = self.stored.find(name)
            if stored is None:
                break
            found.append(stored)
        return found

    def _will_share(self, running: Sequence, waiting: Sequence) -> bool:
        if running.arrival is None:
            return False
        # Blocks are of use one by one, but with recurrent layers only all of them, with the state behind them.
        num_blocks = running.arrival.first + 1
        if running.arrival.state is not None:
            num_blocks = running.arrival.first + len(running.arrival.coming)
        end = num_blocks * self._kv.block_size
        if end >= len(waiting.tokens) or waiting.tokens[end - 1] != running.tokens[end - 1]:
            return False
        same = (waiting.cache_salt, waiting.digest) == (running.cache_salt, running.digest)
        return same and waiting.tokens[:end] == running.tokens[:end]
