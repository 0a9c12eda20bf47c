"""Decides where running sequences take snapshots of their states, and from which snapshot a sequence resumes.

The states of recurrent layers exist only behind the last token of a step. So a chunk of a prompt ends where a snapshot
is wanted:

- at the last block boundary of the prompt, for the next turn of the conversation and for other samples of the prompt;
- where the known KV blocks end. There another prompt went on differently, so this is likely to be the end of a system
  prompt. It gets its snapshot at its second use.

While a sequence decodes, it takes a snapshot every SPACING tokens, and drops its last one. So the next turn need not
read the answer again. It does so only if there are two slots for each running sequence. Otherwise the sequences would
take each other's slots all the time.

A copy reads and writes a state once, as each decoded token does. So a snapshot every SPACING tokens costs little.
"""

from __future__ import annotations

from collections.abc import Iterable

from lorafleet.workers.schedule.sequence import Chunk, Sequence, SequenceSnapshots
from lorafleet.workers.schedule.state_snapshots import StateSnapshots

SPACING = 64  # least tokens between two snapshots of a sequence, for which a chunk that ends early is worth its step


class SnapshotPolicy:
    def __init__(self, pool: StateSnapshots, block_size: int) -> None:
        self.pool = pool
        self._block_size = block_size
        self._num_sequences = 0  # between start() and end()

    def start(self, sequence: Sequence, num_known: int, *, is_here: bool = True) -> None:
        """Prepares a sequence that has just got its blocks.

        Args:
            num_known: Number of known blocks at its beginning. It may reuse fewer.
            is_here: Whether the snapshot behind its computed tokens is on the GPU, not on its way from a tier.
        """
        assert sequence.blocks is not None
        size, start = self._block_size, sequence.num_computed
        stops: list[int] = []
        for stop in (num_known * size, (len(sequence.tokens) - 1) // size * size):
            if stop - (stops[-1] if stops else start) >= SPACING:
                stops.append(stop)
        held = SequenceSnapshots(last=start, stops=stops)
        if start and is_here:
            node = sequence.blocks.nodes[-1]
            held.resumes_from = node, self.pool.pin(node)
        sequence.snapshots = held
        self._num_sequences += 1

    def end(self, sequence: Sequence) -> None:
        """Releases what a sequence holds. A step in flight may still write its slots, before any later step."""
        held = sequence.snapshots
        assert held is not None
        if held.resumes_from is not None:
            self.pool.unpin(held.resumes_from[0])
        for slot in (held.reserved, held.taken and held.taken[0]):
            if slot is not None:
                self.pool.give_back(slot)
        sequence.snapshots = None
        self._num_sequences -= 1

    def until_stop(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns the number of a prompt's next tokens, at most num_tokens, until a snapshot must be taken."""
        held = sequence.snapshots
        if held is None or not held.stops:
            return num_tokens
        return min(num_tokens, held.stops[0] - sequence.num_computed)

    def chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Makes a chunk with the copies of states before it and behind it."""
        held = sequence.snapshots
        assert held is not None
        snapshot = None
        if not sequence.num_unverified and self._ends_at_snapshot(sequence, held, sequence.num_computed + num_tokens):
            if held.reserved is None:
                held.reserved = self.pool.reserve()
            snapshot = held.reserved
        return Chunk(sequence, num_tokens, held.resumes_from and held.resumes_from[1], snapshot)

    def _ends_at_snapshot(self, sequence: Sequence, held: SequenceSnapshots, end: int) -> bool:
        if held.taken is not None:
            return False
        if held.stops:
            return end == held.stops[0]
        if end <= sequence.num_prompt or end % self._block_size or end - held.last < SPACING:
            return False
        return self._takes_in_answers

    def is_due(self, sequence: Sequence) -> bool:
        """Returns whether the sequence takes a snapshot behind its next token if all drafts in flight are right."""
        held = sequence.snapshots
        if held is None:
            return False
        return self._ends_at_snapshot(sequence, held, sequence.num_computed + sequence.num_unverified + 1)

    @property
    def _takes_in_answers(self) -> bool:
        """Whether sequences take snapshots while they decode."""
        return 2 * self._num_sequences <= self.pool.num_slots

    def drafts_until_stop(self, sequence: Sequence, end: int) -> int:
        """Returns how many drafts a sequence may have behind its first `end` tokens. If they were all accepted, its
        next token would be the last before a snapshot is taken."""
        held = sequence.snapshots
        assert held is not None
        if not self._takes_in_answers:
            return sequence.num_remaining
        size = self._block_size
        stop = -(-max(held.last + SPACING, end + 1) // size) * size
        return stop - end - 1

    def launched(self, chunk: Chunk) -> None:
        """Records that the step of the chunk is in flight, and that its sequence goes on behind it. Later steps may
        resume from its snapshot."""
        sequence, held = chunk.sequence, chunk.sequence.snapshots
        assert held is not None
        if held.resumes_from is not None:
            self.pool.unpin(held.resumes_from[0])
            held.resumes_from = None
        if held.stops and held.stops[0] <= sequence.num_computed:
            del held.stops[0]
        if chunk.snapshot is not None:
            held.taken, held.reserved = (chunk.snapshot, sequence.num_computed), None
            held.last = sequence.num_computed
            self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Publishes the snapshot that a sequence has taken, once the tokens before it are known."""
        held, blocks = sequence.snapshots, sequence.blocks
        if held is None or held.taken is None or blocks is None:
            return
        slot, num_tokens = held.taken
        num_blocks = num_tokens // self._block_size
        if num_blocks > len(blocks.nodes):
            return
        node = blocks.nodes[num_blocks - 1]
        self.pool.publish(slot, node)
        held.taken = None
        if num_tokens > sequence.num_prompt:
            if held.answer_node is not None:
                self.pool.forget(held.answer_node)
            held.answer_node = node

    def is_worth_waiting(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Returns whether a running sequence is about to take a snapshot from which the waiting one could resume."""
        return sequence.reuses_prefixes and any(_will_share(other, sequence) for other in running)


def _will_share(running: Sequence, waiting: Sequence) -> bool:
    if running.snapshots is None or not running.snapshots.stops:
        return False
    stop = running.snapshots.stops[0]
    if stop >= len(waiting.tokens) or waiting.tokens[stop - 1] != running.tokens[stop - 1]:
        return False
    if (waiting.cache_salt, waiting.digest) != (running.cache_salt, running.digest):
        return False
    return waiting.tokens[:stop] == running.tokens[:stop]
