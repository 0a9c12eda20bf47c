"""Allocates KV blocks and records which of them hold a known prefix. It knows tokens and block numbers, not tensors.

A full block is identified by the node before it, its owner and its tokens. These are compared exactly, not by a hash,
so that no two prefixes can be confused. The owner is a root for one adapter digest and one tenant (or a client's own
salt). So a reload of the same bytes preserves its prefixes, and neither other weights nor other tenants ever see them.
The blocks before an activated LoRA begins to work belong to the base model.

Unused blocks stay known until they are needed. The least recently used are reused first. workers/kv_tiers/ may save
their content then.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

# A waiting sequence's cached blocks become the most recently used again after at least this many others were taken.
REFRESH_BLOCKS = 64
NO_NODE = -1  # of a block whose content is not known

BlockKey = tuple[int, int, tuple[int, ...]]  # node before, owner's root, tokens
Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]
Float64s = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks of one sequence. The first num_shared belong to shared_root, the others to root."""

    root: int
    shared_root: int
    num_shared: int = 0
    table: array[int] = field(default_factory=lambda: array("i"))  # int32, since every step's attention plan copies it
    nodes: list[int] = field(default_factory=list)  # chain of known full blocks, as far as committed

    def owner(self, block: int) -> int:
        """Returns the root that a block belongs to, by its index."""
        return self.shared_root if block < self.num_shared else self.root

    def key_behind(self, nodes: Sequence[int], block: int, tokens: Sequence[int]) -> BlockKey:
        """Returns the key of the block behind these nodes."""
        owner = self.owner(block)
        return nodes[-1] if nodes else owner, owner, tuple(tokens)


@dataclass(slots=True)
class PrefixMatch:
    """The known blocks at the start of a sequence that waits. It holds none of them, so any may be reused meanwhile."""

    owners: tuple[int, int, int]  # Roots and number of shared blocks, as in SequenceBlocks.
    table: array[int] = field(default_factory=lambda: array("i"))
    nodes: array[int] = field(default_factory=lambda: array("q"))  # Node of each block.
    num_forgotten: int = 0  # The manager's counter when all of them were known.
    refresh_due: int = 0  # The manager's count of taken blocks at which they should become recently used again.

    def first(self, num_blocks: int) -> PrefixMatch:
        """Returns a match of its first blocks alone."""
        return PrefixMatch(self.owners, self.table[:num_blocks], self.nodes[:num_blocks], self.num_forgotten)


@dataclass(slots=True)
class PrefixCounts:
    query_tokens: int = 0  # Prompt tokens looked up in the prefix cache.
    hit_tokens: int = 0  # Prompt tokens that it knew.
    # The latest time, by time.monotonic(), at which a block that is forgotten by now was in use; 0 if there is none.
    forgotten_s: float = 0.0


class _Roots:
    """The numbers of the owners of blocks, by salt. Clients may choose salts, so a root without uses takes no memory.

    Args:
        numbers: Yields numbers that no node has.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._roots: dict[Hashable, int] = {}
        self._salts: dict[int, Hashable] = {}
        self._users: Counter[int] = Counter()  # open sequences and known blocks, by root

    def __len__(self) -> int:
        return len(self._roots)

    def use(self, salt: Hashable) -> int:
        """Returns the salt's root, which leave() releases."""
        if salt not in self._roots:
            self._roots[salt] = next(self._numbers)
            self._salts[self._roots[salt]] = salt
        root = self._roots[salt]
        self.use_again(root)
        return root

    def salt(self, root: int) -> Hashable:
        return self._salts[root]

    def use_again(self, root: int) -> None:
        self._users[root] += 1

    def leave(self, root: int) -> None:
        self._users[root] -= 1
        if not self._users[root]:
            del self._users[root]
            del self._roots[self._salts.pop(root)]


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.counts = PrefixCounts()
        self.num_forgotten = 0  # known blocks that were forgotten so far
        # Called with the node, the key and the owner's salt of a block that becomes known.
        self.on_known: Callable[[int, BlockKey, Hashable], None] | None = None
        # Called with the node of a known block that is forgotten, and the block, whose content is still there.
        self.on_forget: Callable[[int, int], None] | None = None
        self._users = array("i", [0]) * num_blocks  # of each block
        self._nodes = array("q", [NO_NODE]) * num_blocks  # of each block, if its content is known
        self._keys: list[BlockKey | None] = [None] * num_blocks  # likewise
        self._num_taken = 0  # blocks that were taken so far
        # The time, by time.monotonic(), since which each block is free.
        self._free: OrderedDict[int, float] = OrderedDict.fromkeys(range(num_blocks), 0.0)
        self._known: dict[BlockKey, tuple[int, int]] = {}  # node and block of each key
        self._next_node = count()
        self._roots = _Roots(self._next_node)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing(self, blocks: SequenceBlocks, num_tokens: int) -> int:
        """Returns the number of blocks that a sequence needs besides its own to hold this many tokens."""
        return max(0, self.blocks_for(num_tokens) - len(blocks.table))

    def open(self, salt: Hashable, shared_salt: Hashable = None, num_shared_tokens: int = 0) -> SequenceBlocks:
        """Starts the block table of a sequence. Return it with release().

        Args:
            salt: Everything besides the tokens that blocks must have in common to be shared: the adapter's digest and
                the tenant.
            shared_salt: The same for the first num_shared_tokens.
        """
        root = self._roots.use(salt)
        num_shared = num_shared_tokens // self.block_size
        return SequenceBlocks(root, self._roots.use(shared_salt if num_shared else salt), num_shared)

    def find_prefix(
        self, blocks: SequenceBlocks, tokens: Sequence[int], found: PrefixMatch | None = None
    ) -> PrefixMatch:
        """Finds the known blocks at the start of `tokens`, and takes none of them.

        The last token is always left to compute, since its logits are needed.

        Args:
            found: The result of the last call for the same sequence. It is updated, so that a sequence that waits
                looks up only what is new.
        """
        owners = blocks.root, blocks.shared_root, blocks.num_shared
        if found is None or found.owners != owners:
            found = PrefixMatch(owners)
        elif found.num_forgotten != self.num_forgotten:
            self._drop_forgotten(found)
        found.num_forgotten = self.num_forgotten
        size = self.block_size
        for start in range(len(found.table) * size, len(tokens) - size if self.enable_prefix_caching else 0, size):
            known = self._known.get(blocks.key_behind(found.nodes, start // size, tokens[start : start + size]))
            if known is None:
                break
            found.nodes.append(known[0])
            found.table.append(known[1])
        return found

    def num_left(self, num_tokens: int, prefix: PrefixMatch | None = None) -> int:
        """Returns the number of blocks that would be free beside one more sequence, which begins with this prefix.

        It is negative if too few are free for the sequence.
        """
        if prefix is None or not prefix.table:
            return self.num_free - self.blocks_for(num_tokens)
        num_unused = int(np.count_nonzero(np.frombuffer(self._users, np.int32)[prefix.table] == 0))
        return self.num_free - num_unused - (self.blocks_for(num_tokens) - len(prefix.table))

    def refresh(self, prefix: PrefixMatch) -> None:
        """Makes the blocks that a sequence waits to reuse the last ones that are taken for others, if it is due."""
        if self._num_taken < prefix.refresh_due:
            return
        unused = [block for block in prefix.table if block in self._free]
        for block in reversed(unused):
            self._free.move_to_end(block)
        prefix.refresh_due = self._num_taken + max(REFRESH_BLOCKS, (self.num_free - len(unused)) // 2)

    def reuse_prefix(
        self,
        blocks: SequenceBlocks,
        tokens: Sequence[int],
        found: PrefixMatch | None = None,
        most_blocks: int | None = None,
    ) -> int:
        """Takes over the known blocks at the start of `tokens`, and returns the number of tokens that they hold.

        Args:
            found: As in find_prefix.
            most_blocks: Largest number of blocks to take over. None means no limit.
        """
        assert not blocks.table
        if not self.enable_prefix_caching:
            return 0
        found = self.find_prefix(blocks, tokens, found)
        for block in found.table[:most_blocks]:
            self._take(block)
        blocks.table.extend(found.table[:most_blocks])
        blocks.nodes.extend(found.nodes[:most_blocks])
        hit = len(blocks.table) * self.block_size
        self.counts.query_tokens += len(tokens)
        self.counts.hit_tokens += hit
        return hit

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Adds blocks until num_tokens fit. Returns False and changes nothing if too few are free."""
        wanted = self.num_missing(blocks, num_tokens)
        if wanted > len(self._free):
            return False
        for _ in range(wanted):
            block = next(iter(self._free))
            self._forget(block)
            self._take(block)
            blocks.table.append(block)
        return True

    def commit(self, blocks: SequenceBlocks, tokens: Sequence[int], num_computed: int) -> None:
        """Publishes the blocks that are now full, so that other sequences can use them."""
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for i in range(len(blocks.nodes), num_computed // size):
            key = blocks.key_behind(blocks.nodes, i, tokens[i * size : (i + 1) * size])
            own = (next(self._next_node), blocks.table[i])
            if self.on_known is not None and key not in self._known:  # Before the key is known, since it may fail.
                self.on_known(own[0], key, self._roots.salt(key[1]))
            # If another sequence computed this block at the same time, its block stays the known one, and ours stays
            # private.
            found = self._known.setdefault(key, own)
            if found is own:
                self._roots.use_again(key[1])
                self._nodes[blocks.table[i]], self._keys[blocks.table[i]] = found[0], key
            blocks.nodes.append(found[0])

    def release(self, blocks: SequenceBlocks) -> None:
        """Frees the blocks, the last one first, so that an old prefix is forgotten from its end."""
        self.let_go(blocks.table)
        del blocks.table[:]
        blocks.nodes.clear()
        self._roots.leave(blocks.root)
        self._roots.leave(blocks.shared_root)

    def salt_of(self, blocks: SequenceBlocks, block: int) -> Hashable:
        """Returns the salt of a block's owner, by the block's index in a sequence."""
        return self._roots.salt(blocks.owner(block))

    def hold(self, blocks: Sequence[int]) -> None:
        """Counts one more user of blocks that are in use, until let_go()."""
        for block in blocks:
            assert self._users[block]
            self._take(block)

    def let_go(self, blocks: Sequence[int]) -> None:
        """Counts one user fewer of each block, the last one first, and frees those without users."""
        now_s = time.monotonic()
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = now_s
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)

    def withhold(self, blocks: Sequence[int]) -> None:
        """Counts one more user of these blocks, and forgets the content of those that were free. No sequence gets the
        free ones until let_go(). The others may be shared until their sequences have left them."""
        for block in blocks:
            if block in self._free:
                self._forget(block)
            self._take(block)

    def are_left(self, blocks: range) -> bool:
        """Returns whether consecutive blocks that are withheld have no other user."""
        return bool((np.frombuffer(self._users, np.int32)[blocks.start : blocks.stop] == 1).all())

    def forget(self, blocks: Iterable[int]) -> None:
        """Forgets the content of these blocks."""
        for block in blocks:
            self._forget(block)

    def users(self) -> Int32s:
        """Returns the number of users of each block, [N]. It is a copy."""
        return np.array(self._users, np.int32)

    def idle_since(self) -> Float64s:
        """Returns for each block the time, by time.monotonic(), since which it is free, [N]. It is 0 for a block that
        is in use or has no known content, and for one that was never used."""
        since_N = np.zeros(self.num_blocks)
        since_N[np.fromiter(self._free.keys(), np.int64, len(self._free))] = np.fromiter(
            self._free.values(), np.float64, len(self._free)
        )
        since_N[np.frombuffer(self._nodes, np.int64) == NO_NODE] = 0.0
        return since_N

    def idle_since_of(self, block: int) -> float:
        """Returns the entry of idle_since() for one block."""
        return self._free.get(block, 0.0) if self._keys[block] is not None else 0.0

    def next_to_leave(self, num_blocks: int) -> list[int]:
        """Returns the free blocks that are taken next, in their order."""
        return list(islice(self._free, num_blocks))

    def salt_of_content(self, block: int) -> Hashable:
        """Returns the salt of the owner of a block's content, or None if the content is not known."""
        key = self._keys[block]
        return None if key is None else self._roots.salt(key[1])

    def flush(self) -> None:
        """Forgets the content of all blocks that no sequence uses."""
        for block in self._free:
            self._forget(block)

    def _take(self, block: int) -> None:
        self._users[block] += 1
        self._num_taken += 1
        self._free.pop(block, None)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._known[key]
            if self.on_forget is not None:
                self.on_forget(self._nodes[block], block)
            self._nodes[block], self._keys[block] = NO_NODE, None
            self.num_forgotten += 1
            self.counts.forgotten_s = max(self.counts.forgotten_s, self._free.get(block, time.monotonic()))
            self._roots.leave(key[1])

    def _drop_forgotten(self, found: PrefixMatch) -> None:
        """Shortens a match to the blocks before the first one that was forgotten. A node is never used again."""
        wrong = np.flatnonzero(np.frombuffer(self._nodes, np.int64)[found.table] != found.nodes)
        if len(wrong):
            del found.table[wrong[0] :]
            del found.nodes[wrong[0] :]
